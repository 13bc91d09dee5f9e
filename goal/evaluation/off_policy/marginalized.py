"""Marginalised importance sampling over an aggregation of states."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from goal.errors import ConfigurationError
from goal.evaluation.off_policy.decisions import Floats, Integers, LoggedDecisions, kish
from goal.evaluation.off_policy.estimate import (
    MINIMUM_EFFECTIVE_SIZE,
    MOST_UNSUPPORTED,
    OffPolicyEstimates,
    check_settings,
    conclude,
)

FEW = 10
MOST_THIN = 0.1


def marginalized_importance_sampling(
    decisions: LoggedDecisions,
    *,
    states: ArrayLike | None = None,
    bins: int = 4,
    confidence: float = 0.9,
    minimum_effective_size: float = MINIMUM_EFFECTIVE_SIZE,
) -> OffPolicyEstimates:
    """Outcomes weighted by how much oftener the target meets their state, times the ratio of the one decision.

    The share d_t(z) of trajectories that the target brings to cell z at step t is carried forward by the log's own
    moves, each weighted by the ratio rho of its decision, and normalised within the cell:

        weight of row i in cell z at step t = d_t(z) rho_i / sum of rho over that cell's rows
        d_t+1(z') = sum of the weights of the rows that move to z'

    Weights are those of one decision, so the effective size does not fall exponentially with the horizon. The price is
    a bias where states in one cell differ in what follows.

    Source: Xie, Ma & Wang (2019), "Towards optimal off-policy evaluation for reinforcement learning with marginalized
    importance sampling", eq. (6)-(8). Here the ratios are normalised within each cell, which keeps d_t a distribution,
    and an ended trajectory is a cell of its own.

    Args:
        decisions: the logged decisions with the target's probabilities.
        states: `(N,)` whole numbers from 0 that name the cell of each row's state. By default each feature is cut into
            `bins` quantiles and cells are their combinations.
        bins: quantiles of each feature where `states` is None.
        confidence: of the intervals.
        minimum_effective_size: the estimator abstains below, at the step where the weights are most uneven. It also
            abstains where over a tenth of the target's decisions fall into cells of fewer than 10 rows: so fine a
            partition has one decision a cell, and gives the log's own value back.

    Raises:
        ConfigurationError: a setting cannot work, or `states` do not fit.
    """
    check_settings(confidence, minimum_effective_size)
    cells = aggregate(decisions, bins) if states is None else _states(states, len(decisions))
    trajectories, horizon, count = len(decisions.lengths), decisions.horizon, int(cells.max()) + 1
    starts = np.cumsum(decisions.lengths) - decisions.lengths
    # Rows sorted by step: rows[t] are the rows at step t, and each one's successor, if any, is the next row.
    rows = [starts[decisions.lengths > t] + t for t in range(horizon)]
    ratios, outcomes = decisions.ratios, np.column_stack((decisions.outcomes, np.ones(len(decisions))))

    weights, inflation = np.zeros(len(decisions)), np.ones(len(decisions))
    occupancy = np.bincount(cells[rows[0]], minlength=count) / trajectories
    lost = thin = reached = 0.0
    sizes = []
    for t in range(horizon):
        here = rows[t]
        total = np.bincount(cells[here], weights=ratios[here], minlength=count)
        squares = np.bincount(cells[here], weights=np.square(ratios[here]), minlength=count)
        few = np.bincount(cells[here], minlength=count) < FEW
        reached += float(occupancy.sum())
        thin += float(occupancy[few].sum())
        lost += float(occupancy[total == 0].sum()) * (horizon - t)
        inflation[here] = np.sqrt(_correction(total, squares))[cells[here]]
        weights[here] = occupancy[cells[here]] * ratios[here] / np.where(total > 0, total, 1.0)[cells[here]]
        sizes.append(float(kish(weights[here])) * trajectories / len(here))
        on = here[decisions.lengths[np.asarray(decisions.trajectories)[here]] > t + 1]
        occupancy = np.bincount(cells[on + 1], weights=weights[on], minlength=count)

    sums = weights @ outcomes
    reason = ""
    if sums[2] == 0 or lost > MOST_UNSUPPORTED * horizon:
        reason = (
            "The target reaches states at which the log never took what the target takes: "
            f"{min(lost / horizon, 1):.0%} of its decisions cannot be followed. Use coarser states or amounts, or a "
            "policy closer to the log."
        )
    elif thin > MOST_THIN * reached:
        reason = (
            f"The states are too fine: {thin / reached:.0%} of the target's decisions fall into cells of fewer than "
            f"{FEW} rows. Use fewer features or bins, or pass coarser `states`."
        )
    influence = np.zeros((trajectories, 2))
    if not reason:
        influence = _influence(decisions, cells, rows, weights * inflation, outcomes, sums)
    return conclude(
        "marginalized_importance_sampling",
        decisions,
        influence,
        min(sizes),
        confidence=confidence,
        minimum_effective_size=minimum_effective_size,
        reason=reason,
    )


def aggregate(decisions: LoggedDecisions, bins: int) -> Integers:
    """Cells `(N,)` that are combinations of `bins` quantiles of each feature.

    Raises:
        ConfigurationError: bins is less than 1.
    """
    if bins < 1:
        raise ConfigurationError(f"bins is {bins}: expected at least 1 quantile a feature")
    cells = np.zeros(len(decisions), dtype=np.int64)
    for column in np.asarray(decisions.features).T:
        edges = np.unique(np.quantile(column, np.arange(1, bins) / bins))
        cells = cells * (len(edges) + 1) + np.searchsorted(edges, column, side="left")
        cells = np.unique(cells, return_inverse=True)[1].astype(np.int64)  # only combinations that occur
    return cells


def _influence(
    decisions: LoggedDecisions,
    cells: Integers,
    rows: list[Integers],
    weights: Floats,
    outcomes: Floats,
    sums: Floats,
) -> Floats:
    """`(M, 2)`: the estimate plus what each trajectory adds to its error.

    With V_t(z) what the cell promises from step t on, trajectory u moves the estimate by V_0(z_u0) less its mean, plus
    M times the sum over its rows of weight (r + V_t+1 - V_t). The same is done for the constant outcome 1, and the
    ratio of the two is linearised: outcomes are counted from the estimate.
    """
    trajectories = len(decisions.lengths)
    value = sums[:2] / sums[2]
    rewards = outcomes[:, :2] - value
    count = int(cells.max()) + 1
    following = np.zeros((len(decisions) + 1, 2))
    influence = np.zeros((trajectories, 2))
    own = np.asarray(decisions.trajectories)
    for t in reversed(range(len(rows))):
        here = rows[t]
        last = decisions.lengths[own[here]] == t + 1
        backup = rewards[here] + np.where(last[:, None], 0.0, following[here + 1])
        ratios = decisions.ratios[here]
        total = np.bincount(cells[here], weights=ratios, minlength=count)
        promise = (
            np.stack(
                [np.bincount(cells[here], weights=ratios * column, minlength=count) for column in backup.T], axis=1
            )
            / np.where(total > 0, total, 1.0)[:, None]
        )
        following[here] = promise[cells[here]]
        influence[own[here]] += trajectories * weights[here, None] * (backup - following[here])
    influence += following[rows[0]]
    # What the corrections for small cells leave of a mean is taken off: the mean is the estimate.
    return value + (influence - influence.mean(axis=0)) / sums[2]


def _correction(total: np.ndarray, squares: np.ndarray) -> np.ndarray:
    """e / (e - 1) with e the effective number of rows of a cell: residuals around a cell's own mean are too small."""
    effective = np.maximum(np.square(total) / np.where(squares > 0, squares, 1.0), 2.0)
    return effective / (effective - 1)


def _states(states: ArrayLike, rows: int) -> Integers:
    cells = np.asarray(states)
    if not np.issubdtype(cells.dtype, np.integer) or cells.shape != (rows,) or cells.min() < 0:
        raise ConfigurationError(
            f"states has type {cells.dtype} and shape {cells.shape}: expected whole numbers from 0 of shape ({rows},)"
        )
    return np.unique(cells, return_inverse=True)[1].astype(np.int64)
