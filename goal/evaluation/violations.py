"""How often the best policy of the same average ROI misses the target: part of every violation rate is plain noise."""

from __future__ import annotations

import numpy as np

from goal.evaluation import metrics
from goal.evaluation.rollout import rollout
from goal.simulator import Parameters, VectorEnvironment
from goal.simulator.oracle import Oracle, solve

STEPS = 24
"""Halvings of the range of multipliers."""


class _Plans:
    """Each user follows one plan of amounts, `(users, T)`."""

    def __init__(self, plans: np.ndarray) -> None:
        self.plans = plans

    def allocate_privileged(self, environment: VectorEnvironment, multiplier: float) -> np.ndarray:
        return self.plans[:, environment.time]


def oracle_violation_rate(
    parameters: Parameters, roi: float, *, target: float, users: int, seed: int, window: int, stride: int
) -> float | None:
    """ROI violation rate of the oracle where its average ROI is ``roi``.

    The oracle's ROI rises with the multiplier in steps, one a plan. Between two plans a share of the users, drawn by
    the seed, follows each, so that the average is met.

    Args:
        parameters: the environment; its users must be alike.
        roi: average ROI to meet, such as that of the policy beside which the rate stands.
        target: ROI whose violations are counted.
        users: how many users.
        seed: of the users, their luck and their plans.
        window: interactions per window.
        stride: interactions between the starts of windows.

    Returns:
        The rate, or None where no oracle has that ROI.

    Raises:
        ConfigurationError: as `rollout` and `metrics.roi_violation_rate`.
    """
    low, high = 0.0, 2.0 * roi
    below, above = solve(parameters, low), solve(parameters, high)
    if below.roi > roi or above.roi < roi or below.cost == 0:
        return None
    for _ in range(STEPS):
        middle = (low + high) / 2
        found = solve(parameters, middle)
        if found.roi < roi:
            low, below = middle, found
        else:
            high, above = middle, found
    share = _share_above(below, above, roi)
    takes_above = np.random.default_rng(seed).permutation(users) < round(share * users)
    plans = np.where(takes_above[:, None], above.plan, below.plan)
    stream = rollout(_Plans(plans), parameters, 0.0, users=users, seed=seed).stream()
    return metrics.roi_violation_rate(*stream, target=target, window=window, stride=stride)


def _share_above(below: Oracle, above: Oracle, roi: float) -> float:
    """Share of users on the plan of higher ROI with which revenue = roi * cost overall."""
    missing, spare = roi * below.cost - below.revenue, above.revenue - roi * above.cost
    return missing / (missing + spare) if missing + spare > 0 else 1.0
