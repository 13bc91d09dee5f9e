"""The set of multipliers a policy is trained on (appendix "Selection of Candidate lambda Sets")."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from goal.errors import ConfigurationError


def candidates(roi_target: float, *, step: float, threshold: float | None = None) -> tuple[float, ...]:
    """Multipliers `(0, step, 2 step, ..., top)` with `top = max(roi_target, threshold)`.

    The dual variable never exceeds the ROI target (Eq. 4 of the paper: `lambda = lambda' tau / (1 + lambda')`),
    but a policy that should also know the regime in which paying never pays needs multipliers up to the
    threshold of Proposition 1. The last multiplier is `top` itself, also where the step does not divide it.

    Args:
        roi_target: Revenue per unit of cost to reach; positive.
        step: Distance between neighbours, in the unit of the multiplier (revenue per unit of cost); positive.
        threshold: The `threshold` of this module, or `None` to stop at `roi_target`.

    Raises:
        ConfigurationError: A value is not finite, not positive, or would give more than 10,000 multipliers.

    >>> candidates(3.0, step=0.5)
    (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0)
    >>> candidates(3.0, step=1.0, threshold=4.1)
    (0.0, 1.0, 2.0, 3.0, 4.0, 4.1)
    """
    for name, value in (("roi_target", roi_target), ("step", step)):
        if not (math.isfinite(value) and value > 0):
            raise ConfigurationError(f"{name} is {value}: expected a positive number")
    if threshold is not None and not (math.isfinite(threshold) and threshold >= 0):
        raise ConfigurationError(f"threshold is {threshold}: expected a number of at least 0, or None")
    top = max(float(roi_target), float(threshold or 0.0))
    if top / step > 10_000:
        raise ConfigurationError(f"step is {step}: it would give {top / step:.0f} multipliers up to {top}; enlarge it")
    # Multiples of the step that differ from the top by rounding only are the top.
    below = math.ceil(top / step - 1e-9)
    return (*(round(index * step, 12) for index in range(below)), top)


def threshold(revenue: ArrayLike, cost: ArrayLike, *, quantile: float = 1.0) -> float:
    """The multiplier from which the cheapest amount is the best one (Proposition 1).

    In a state with expected revenue `r_i` and cost `c_i` of amount `i`, cheapest first,

        threshold = max(0, max over i > 1 of (r_i - r_1) / (c_i - c_1)).

    Over several states it is the maximum: from there on the cheapest amount is the best in every one of them.
    A lower `quantile` is robust against a few states whose expected revenue is badly estimated.

    Args:
        revenue: `(amounts,)` or `(states, amounts)`, expected revenue of each amount.
        cost: `(amounts,)` or `(states, amounts)`, its cost, strictly ascending along the last axis.
        quantile: Which quantile over states to return, in (0, 1]; 1 is the maximum.

    Raises:
        ConfigurationError: Shapes disagree, fewer than two amounts, costs do not ascend, a value is not finite.

    >>> threshold([1.0, 4.0, 5.0], [0.0, 1.0, 2.0])
    3.0
    """
    revenue = np.asarray(revenue, dtype=np.float64)
    cost = np.asarray(cost, dtype=np.float64)
    if revenue.ndim not in (1, 2) or cost.ndim not in (1, 2) or revenue.shape[-1:] != cost.shape[-1:]:
        raise ConfigurationError(
            f"revenue has shape {revenue.shape} and cost {cost.shape}: expected (amounts,) or (states, amounts) "
            "with as many amounts in both"
        )
    revenue, cost = np.atleast_2d(revenue), np.atleast_2d(cost)
    if revenue.shape[0] == 0 or revenue.shape[1] < 2 or cost.shape[0] not in (1, revenue.shape[0]):
        raise ConfigurationError(
            f"revenue covers {revenue.shape} (states, amounts) and cost {cost.shape}: expected at least one state and "
            "two amounts, and costs for one state or for the same number of states"
        )
    if not (np.isfinite(revenue).all() and np.isfinite(cost).all()):
        raise ConfigurationError("revenue or cost holds NaN or infinity: expected finite numbers")
    if not (np.diff(cost, axis=1) > 0).all():
        raise ConfigurationError("cost does not ascend strictly along the amounts: sort them, cheapest first")
    if not 0 < quantile <= 1:
        raise ConfigurationError(f"quantile is {quantile}: expected a number in (0, 1]")
    gain_per_cost = (revenue[:, 1:] - revenue[:, :1]) / (cost[:, 1:] - cost[:, :1])
    per_state = np.maximum(gain_per_cost.max(axis=1), 0.0)
    # An observed state's threshold, so that the maximum is the maximum and no state is invented in between.
    return float(np.quantile(per_state, quantile, method="inverted_cdf"))


def without_rises(multipliers: ArrayLike, cost: ArrayLike) -> np.ndarray:
    """Multipliers to serve in place of those asked for, so that cost never rises with what is asked for.

    A policy may cost a little more under a larger multiplier than under a smaller one. Such a multiplier is served as
    the largest below it whose cost is the least so far: the cost that is served is the running minimum.

    Args:
        multipliers: `(n,)`, ascending.
        cost: `(n,)`, mean cost at each, measured on the same users and the same randomness.

    Returns:
        `(n,)`, each of them one of ``multipliers``, ascending.

    Raises:
        ConfigurationError: Shapes differ, multipliers do not ascend, or a value is not finite.

    >>> without_rises([0.0, 1.0, 2.0, 3.0], [9.0, 5.0, 5.5, 4.0])
    array([0., 1., 1., 3.])
    """
    multipliers, cost = np.asarray(multipliers, dtype=np.float64), np.asarray(cost, dtype=np.float64)
    if multipliers.ndim != 1 or multipliers.shape != cost.shape:
        raise ConfigurationError(
            f"multipliers has shape {multipliers.shape} and cost {cost.shape}: expected one cost for each multiplier"
        )
    if not (np.isfinite(multipliers).all() and np.isfinite(cost).all()) or (np.diff(multipliers) <= 0).any():
        raise ConfigurationError(
            "multipliers and cost: expected finite numbers, and multipliers that ascend; sort both"
        )
    is_least = cost == np.minimum.accumulate(cost)
    return multipliers[np.maximum.accumulate(np.where(is_least, np.arange(len(cost)), 0))]
