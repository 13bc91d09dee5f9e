"""What an off-policy estimator is given: the logged decisions and what the target policy would have done at each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from goal.errors import ConfigurationError
from goal.log import InteractionLog

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class LoggedDecisions:
    """N logged decisions over A actions, in M trajectories of at most T steps, of C users.

    Rows of one trajectory stand together in time order. What a policy is worth is told per decision; the lengths of
    the trajectories are taken as given, as are the states at which they begin.

    Args:
        actions: `(N,)` index of the action that was logged, 0 to A-1.
        propensities: `(N,)` probability with which the log's policy took it, in (0, 1], given all it knew.
        target: `(N, A)` probability of each action under the target policy at the same state; rows sum to 1.
        revenue: `(N,)` in money.
        cost: `(N,)` in money.
        trajectories: `(N,)` whole number that names the trajectory of a row, None where each decision is one.
        users: `(N,)` whole number that names the user of a row; intervals count users, not rows, as independent. None:
            each trajectory has a user of its own.
        features: `(N, F)` what is known of the state before the decision, finite; read by the models of doubly robust
            and fitted Q estimates and by the cells of marginalised ones, which take the state to be Markov.

    Raises:
        ConfigurationError: shapes do not fit or a value cannot be right; the message says which and what to do.

    Example:
        >>> decisions = LoggedDecisions(
        ...     actions=[0, 1], propensities=[0.5, 0.5], target=[[0.0, 1.0], [0.0, 1.0]], revenue=[2.0, 5.0],
        ...     cost=[0.0, 1.0],
        ... )
        >>> decisions.ratios
        array([0., 2.])
    """

    actions: ArrayLike
    propensities: ArrayLike
    target: ArrayLike
    revenue: ArrayLike
    cost: ArrayLike
    trajectories: ArrayLike | None = None
    users: ArrayLike | None = None
    features: ArrayLike | None = None

    def __post_init__(self) -> None:
        target = _numbers("target", self.target, 2)
        rows, count = target.shape
        if rows == 0 or count == 0:
            raise ConfigurationError(f"target has shape {target.shape}: expected at least one decision and one action")
        if (target < 0).any() or np.abs(target.sum(1) - 1).max() > 1e-6:
            raise ConfigurationError(
                "target: expected probabilities of at least 0 that sum to 1 in each row; rows sum to "
                f"{target.sum(1).min():g} to {target.sum(1).max():g} and the smallest is {target.min():g}. Divide each "
                "row by its sum"
            )
        actions = _labels("actions", self.actions, rows)
        if actions.min() < 0 or actions.max() >= count:
            raise ConfigurationError(
                f"actions run from {actions.min()} to {actions.max()}: expected 0 to {count - 1}, the columns of target"
            )
        propensities = _numbers("propensities", self.propensities, 1, rows)
        if (propensities <= 0).any() or (propensities > 1).any():
            raise ConfigurationError(
                f"propensities run from {propensities.min():g} to {propensities.max():g}: expected above 0 and at most "
                "1, since an action of probability 0 cannot have been logged. Log the probability of the amount drawn"
            )
        trajectories = (
            np.arange(rows) if self.trajectories is None else _labels("trajectories", self.trajectories, rows)
        )
        begins = np.flatnonzero(np.r_[True, trajectories[1:] != trajectories[:-1]])
        if len(np.unique(trajectories)) < len(begins):
            raise ConfigurationError("trajectories: rows of one trajectory are apart; sort by trajectory, then by time")
        trajectories = np.repeat(np.arange(len(begins)), np.diff(np.r_[begins, rows]))
        users = trajectories if self.users is None else _labels("users", self.users, rows)
        if (users != users[begins][trajectories]).any():
            raise ConfigurationError("users: a trajectory has two users; name each trajectory of each user apart")
        features = np.empty((rows, 0)) if self.features is None else _numbers("features", self.features, 2, rows)
        checked: dict[str, Any] = {
            "actions": actions, "propensities": propensities, "target": target, "features": features,
            "revenue": _numbers("revenue", self.revenue, 1, rows), "cost": _numbers("cost", self.cost, 1, rows),
            "trajectories": trajectories, "users": np.unique(users, return_inverse=True)[1].astype(np.int64),
        }  # fmt: skip
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_log(
        cls,
        log: InteractionLog,
        target: ArrayLike,
        *,
        amounts: Sequence[float] | Floats,
        rows: Integers | None = None,
        horizon: int | None = None,
        features: ArrayLike | None = None,
    ) -> LoggedDecisions:
        """The decisions of a log whose schema names a propensity.

        Args:
            log: the log.
            target: `(n, A)` the target's probability of each amount at each of the rows.
            amounts: `(A,)` amounts in ascending order; a logged amount counts as the nearest. Exact where all logged
                amounts are among them, else a bin: then the propensity should be the bin's.
            rows: `(n,)` ascending rows of the log to use; all by default.
            horizon: cut each user's decisions into trajectories of that many, the last one shorter: the estimate is
                what following the target for so many decisions is worth from the states where they begin. None: one
                trajectory a user.
            features: `(n, F)` features of the state; the log's numeric features by default, missing ones at their mean.

        Raises:
            ConfigurationError: the log has no propensities, or as of the class.
        """
        if log.propensity is None:
            raise ConfigurationError(
                "log: its schema names no propensity, the probability of each logged amount, so other policies cannot "
                "be valued from it; log it when amounts are drawn, and name its column as `propensity`"
            )
        if horizon is not None and horizon < 1:
            raise ConfigurationError(f"horizon is {horizon}: expected at least 1 decision, or None for whole users")
        rows = np.arange(log.events) if rows is None else np.asarray(rows)
        if len(rows) == 0 or (np.diff(rows) <= 0).any():
            raise ConfigurationError("rows: expected one or more ascending, distinct rows of the log")
        users = log.user_index[rows]
        first = np.flatnonzero(np.r_[True, users[1:] != users[:-1]])
        place = np.arange(len(rows)) - np.repeat(first, np.diff(np.r_[first, len(rows)]))
        length = int(place.max()) + 1 if horizon is None else horizon
        pieces = np.cumsum(place % length == 0) - 1
        if features is None:
            features = np.asarray(log.numeric[rows], dtype=np.float64)
            means = np.nanmean(np.where(np.isnan(features).all(0), 0.0, features), axis=0)
            features = np.where(np.isnan(features), means, features)
        return cls(
            actions=nearest(amounts, log.incentives[rows]), propensities=log.propensity[rows], target=target,
            revenue=log.revenue[rows], cost=log.cost[rows], trajectories=pieces, users=users, features=features,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.ratios)

    def __repr__(self) -> str:
        rows, count = np.shape(self.target)
        shape = f"{rows} decisions over {count} actions"
        return f"LoggedDecisions({shape}, {len(self.lengths)} trajectories of {self.clusters} users)"

    @cached_property
    def ratios(self) -> Floats:
        """`(N,)` probability of the logged action under the target over that under the log's policy."""
        target, actions = np.asarray(self.target), np.asarray(self.actions)
        return target[np.arange(len(actions)), actions] / np.asarray(self.propensities)

    @cached_property
    def lengths(self) -> Integers:
        """`(M,)` steps of each trajectory."""
        return np.bincount(np.asarray(self.trajectories))

    @cached_property
    def steps(self) -> Integers:
        """`(N,)` step of each row within its trajectory, from 0."""
        return np.arange(len(self)) - np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths)

    @cached_property
    def owners(self) -> Integers:
        """`(M,)` user of each trajectory."""
        return np.asarray(self.users)[np.cumsum(self.lengths) - 1]

    @property
    def clusters(self) -> int:
        """C, the number of users."""
        return int(np.asarray(self.users).max()) + 1

    @property
    def horizon(self) -> int:
        """T, the longest trajectory."""
        return int(self.lengths.max())

    @cached_property
    def outcomes(self) -> Floats:
        """`(N, 2)` revenue and cost."""
        return np.column_stack((np.asarray(self.revenue), np.asarray(self.cost)))

    @cached_property
    def present(self) -> NDArray[np.bool_]:
        """`(M, T)` whether the trajectory has that step."""
        return np.arange(self.horizon) < self.lengths[:, None]

    def pad(self, values: Floats, fill: float = 0.0) -> Floats:
        """Values of the rows `(N, ...)` as `(M, T, ...)`, `fill` after a trajectory's end."""
        padded = np.full((*self.present.shape, *values.shape[1:]), fill)
        padded[self.present] = values
        return padded

    @cached_property
    def cumulative_ratios(self) -> np.ndarray:
        """`(M, T)` product of the ratios up to each step; it stays what it was after a trajectory's end."""
        return np.cumprod(self.pad(self.ratios, 1.0), axis=1)


def nearest(amounts: Sequence[float] | Floats, logged: Floats) -> Integers:
    """Index `(N,)` of the amount nearest to each logged one; the lower of two equally near.

    Raises:
        ConfigurationError: amounts are not ascending and distinct.
    """
    grid = _numbers("amounts", amounts, 1)
    if len(grid) == 0 or (np.diff(grid) <= 0).any():
        raise ConfigurationError(f"amounts: {list(amounts)!r} came; expected distinct amounts in ascending order")
    return np.searchsorted((grid[1:] + grid[:-1]) / 2, logged, side="left").astype(np.int64)


def _numbers(name: str, given: ArrayLike, dimensions: int, rows: int | None = None) -> Floats:
    array = np.asarray(given, dtype=np.float64)
    if array.ndim != dimensions or (rows is not None and len(array) != rows):
        expected = ("n" if rows is None else str(rows), "columns")[:dimensions]
        raise ConfigurationError(
            f"{name} has shape {array.shape}: expected ({', '.join(expected)}), one row a decision"
        )
    if not np.isfinite(array).all():
        raise ConfigurationError(f"{name} holds NaN or infinity: remove or fill those decisions first")
    return array


def _labels(name: str, given: ArrayLike, rows: int) -> Integers:
    array = np.asarray(given)
    if not (np.issubdtype(array.dtype, np.integer) and array.shape == (rows,)):
        raise ConfigurationError(
            f"{name} has type {array.dtype} and shape {array.shape}: expected whole numbers of shape ({rows},), one a "
            "decision"
        )
    return array.astype(np.int64)


def kish(weights: Floats) -> Floats:
    """Effective size `(sum w)^2 / sum w^2` of weights over the first axis; 0 where all are 0."""
    squares = np.square(weights).sum(axis=0)
    return np.square(weights.sum(axis=0)) / np.where(squares > 0, squares, 1.0)
