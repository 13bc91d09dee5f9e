"""Rolling a policy out in a simulated environment.

Shapes: U users, n multipliers, R = n * U rows of one user under one multiplier, T steps, L window, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from goal.errors import ConfigurationError
from goal.evaluation.policies import Allocator, PrivilegedPolicy
from goal.log import History
from goal.simulator import Parameters, VectorEnvironment
from goal.simulator.oracle import users_revenue
from goal.simulator.users import arrivals, draw_users

DEFAULT_WINDOW = 16
# Rows that a policy sees at once: enough to fill a processor, few enough for its activations to stay small.
BATCH_ROWS = 1024


class Stream(NamedTuple):
    """Interactions of all users in time order, `(users * T,)` each, in money."""

    revenue: NDArray[np.float64]
    cost: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Rollout:
    """What a policy did and what came of it.

    Attributes:
        multiplier: The multiplier it was given.
        revenue: `(users, T)`, in money.
        cost: `(users, T)`, in money.
        amounts: `(users, T)`, paid, on the environment's levels, in incentive units.
        engaged: `(users, T)`, bool.
        arrivals: `(users,)`, time of each user's first step; step `t` happens at `arrivals + t`.
    """

    multiplier: float
    revenue: NDArray[np.float64]
    cost: NDArray[np.float64]
    amounts: NDArray[np.float64]
    engaged: NDArray[np.bool_]
    arrivals: NDArray[np.float64]

    def stream(self) -> Stream:
        """All interactions in the order in which they happen; users at the same instant keep their order."""
        time = self.arrivals[:, None] + np.arange(self.revenue.shape[1])
        order = np.argsort(time, axis=None, kind="stable")
        return Stream(self.revenue.ravel()[order], self.cost.ravel()[order])

    def first(self, users: int) -> Rollout:
        """The same of the first users alone, as a rollout of no more of them makes it."""
        return Rollout(
            self.multiplier, self.revenue[:users], self.cost[:users], self.amounts[:users], self.engaged[:users],
            self.arrivals[:users],
        )  # fmt: skip

    def per_user(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean revenue and mean cost per step of each user, `(users,)` both; what calibration compares."""
        return self.revenue.mean(axis=1), self.cost.mean(axis=1)


def expected_revenue(made: Rollout, parameters: Parameters, *, seed: int) -> NDArray[np.float64]:
    """Mean revenue per step of each user, `(users,)`, that what was paid brings in expectation.

    Fatigue follows from the amounts alone, so that the luck of single engagements and their revenue need not be in it.

    Args:
        made: a rollout.
        parameters: the environment it was made in.
        seed: of the users, as then.
    """
    return users_revenue(parameters, draw_users(parameters, users=len(made.amounts), seed=seed), made.amounts)


def rollout(
    policy: Allocator | PrivilegedPolicy, parameters: Parameters, multiplier: float, *, users: int, seed: int
) -> Rollout:
    """Lets a policy pay `users` simulated users from their first step to the horizon.

    Users and their luck depend on the seed alone, so two policies under one seed are compared on equal terms. All
    users are stepped together; the policy sees the last `policy.config.window` events (16 where it has no such
    setting), the pending one included. Amounts are snapped to the environment's nearest level before they act.

    Args:
        policy: See `goal.evaluation.policies.Allocator`.
        parameters: The environment.
        multiplier: What the policy is told; at least 0.
        users: How many users.
        seed: Of the users and their luck.

    Raises:
        ConfigurationError: An argument cannot work, or the policy returned something else than one amount a row.
    """
    return rollout_many(policy, parameters, (multiplier,), users=users, seed=seed)[0]


def rollout_many(
    policy: Allocator | PrivilegedPolicy,
    parameters: Parameters,
    multipliers: Sequence[float],
    *,
    users: int,
    seed: int,
    batch_rows: int = BATCH_ROWS,
) -> tuple[Rollout, ...]:
    """`rollout` under several multipliers at once: the same users and luck for each, in shared batches.

    Args:
        policy: As `rollout`.
        parameters: As `rollout`.
        multipliers: One rollout is made for each.
        users: As `rollout`.
        seed: As `rollout`.
        batch_rows: Rows that the policy sees at once.

    Raises:
        ConfigurationError: As `rollout`.
    """
    multipliers = tuple(float(multiplier) for multiplier in multipliers)
    if not multipliers or not all(np.isfinite(multiplier) and multiplier >= 0 for multiplier in multipliers):
        raise ConfigurationError(f"multipliers is {multipliers}: expected at least one finite multiplier, none below 0")
    if batch_rows < 1:
        raise ConfigurationError(f"batch_rows is {batch_rows}: expected at least 1")
    environments = [VectorEnvironment(parameters, users=users, seed=seed) for _ in multipliers]
    rows, horizon = len(multipliers) * users, parameters.horizon
    revenue, cost, amounts = (np.zeros((rows, horizon)) for _ in range(3))
    engaged = np.zeros((rows, horizon), dtype=np.bool_)
    decisions: _FromEnvironments | _FromHistories
    if isinstance(policy, PrivilegedPolicy):
        decisions = _FromEnvironments(policy, environments, multipliers)
    else:
        decisions = _FromHistories(policy, environments, multipliers, batch_rows)

    for t in range(horizon):
        amounts[:, t] = parameters.levels[parameters.nearest(decisions.allocate(t))]
        for index, environment in enumerate(environments):
            block = slice(index * users, (index + 1) * users)
            step = environment.step(amounts[block, t])
            revenue[block, t], cost[block, t], engaged[block, t] = step.revenue, step.cost, step.engaged
        decisions.record(t, amounts[:, t], revenue[:, t], engaged[:, t])

    start = arrivals(parameters, users=users, seed=seed)
    made = []
    for index, multiplier in enumerate(multipliers):
        block = slice(index * users, (index + 1) * users)
        made.append(Rollout(multiplier, revenue[block], cost[block], amounts[block], engaged[block], start))
    return tuple(made)


class _FromEnvironments:
    """Decisions of a policy that reads the environments themselves."""

    def __init__(
        self, policy: PrivilegedPolicy, environments: Sequence[VectorEnvironment], multipliers: Sequence[float]
    ) -> None:
        self.policy = policy
        self.pairs = tuple(zip(environments, multipliers, strict=True))

    def allocate(self, t: int) -> np.ndarray:
        """Amounts `(R,)` for the step `t`."""
        return np.concatenate([self.policy.allocate_privileged(*pair) for pair in self.pairs])

    def record(self, t: int, amounts: np.ndarray, revenue: np.ndarray, engaged: np.ndarray) -> None:
        """Nothing to keep: the environments know what happened."""


class _FromHistories:
    """Decisions from histories. All rows are at the same step, so a window is a slice and needs no padding."""

    def __init__(
        self,
        policy: Allocator,
        environments: Sequence[VectorEnvironment],
        multipliers: Sequence[float],
        batch_rows: int,
    ) -> None:
        self.policy = policy
        self.environments = environments
        self.batch_rows = batch_rows
        self.multipliers = torch.tensor(multipliers, dtype=torch.float32).repeat_interleave(environments[0].users)
        self.window = int(getattr(getattr(policy, "config", None), "window", DEFAULT_WINDOW))
        self.device = _device(policy)
        parameters = environments[0].parameters
        rows, horizon = len(environments) * environments[0].users, parameters.horizon
        # The pending event's incentive and outcomes are 0: they stay so until the step has been recorded.
        self.numeric = torch.zeros(rows, horizon, len(parameters.numeric_names))
        self.incentives = torch.zeros(rows, horizon)
        self.outcomes = torch.zeros(rows, horizon, 2)

    def allocate(self, t: int) -> np.ndarray:
        """Amounts `(R,)` for the step `t`."""
        features = np.concatenate([environment.features() for environment in self.environments])
        self.numeric[:, t] = torch.from_numpy(features)
        events = slice(max(t + 1 - self.window, 0), t + 1)
        length = events.stop - events.start
        chosen = []
        for start in range(0, len(self.numeric), self.batch_rows):
            rows = slice(start, start + self.batch_rows)
            numeric = self.numeric[rows, events]
            history = History(
                numeric=numeric,
                categorical=torch.zeros(len(numeric), length, 0, dtype=torch.int64),
                incentives=self.incentives[rows, events],
                outcomes=self.outcomes[rows, events],
                lengths=torch.full((len(numeric),), length, dtype=torch.int64),
            )
            with torch.inference_mode():
                amounts = self.policy.allocate(history.to(self.device), self.multipliers[rows].to(self.device))
            if not isinstance(amounts, torch.Tensor) or amounts.shape != (len(numeric),):
                came = tuple(amounts.shape) if isinstance(amounts, torch.Tensor) else type(amounts).__name__
                raise ConfigurationError(
                    f"{type(self.policy).__name__}.allocate returned {came}: expected a tensor of shape "
                    f"({len(numeric)},), one amount for each history"
                )
            chosen.append(amounts.to("cpu", torch.float64).numpy())
        return np.concatenate(chosen)

    def record(self, t: int, amounts: np.ndarray, revenue: np.ndarray, engaged: np.ndarray) -> None:
        """Completes the event of step `t` with what was paid and what came of it, `(R,)` each."""
        self.incentives[:, t] = torch.from_numpy(amounts)
        self.outcomes[:, t, 0] = torch.from_numpy(revenue)
        self.outcomes[:, t, 1] = torch.from_numpy(engaged)


def _device(policy: object) -> torch.device:
    if isinstance(policy, torch.nn.Module):
        for tensor in (*policy.parameters(), *policy.buffers()):
            return tensor.device
    return torch.device("cpu")
