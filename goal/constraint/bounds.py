"""Bounds for a ratio of means, and the pooling of a noisy monotone curve."""

from __future__ import annotations

import math

import numpy as np


def ratio_bounds(gain: np.ndarray, cost: np.ndarray, deviations: float) -> tuple[float, float]:
    """Bounds for `mean gain / mean cost` (Fieller's method).

    A ratio `L` lies below the truth as far as the data can tell while the slack `gain - L * cost`, which is
    linear in what each user did, has a mean of at least `deviations` times its standard deviation. The bounds
    are where that becomes an equality; unlike the delta method this needs no linearisation and stays right where
    cost is small. An unbounded side is `-inf` or `inf`.

    Args:
        gain: `(users,)`, money gained per user.
        cost: `(users,)`, its cost.
        deviations: Quantile of the error's distribution times `sqrt(1/n + 1/m)`; with `m` new users these are
            prediction bounds for their ratio, since the old and the new mean slack differ by that many standard
            deviations of one user's slack.
    """
    mean_gain, mean_cost = gain.mean(), cost.mean()
    (var_gain, covariance), (_, var_cost) = np.cov(gain, cost)
    squared = deviations**2
    # (mean_gain - L mean_cost)^2 = squared * Var(gain - L cost), a quadratic in L.
    a = mean_cost**2 - squared * var_cost
    b = mean_gain * mean_cost - squared * covariance
    c = mean_gain**2 - squared * var_gain
    if a == 0:
        roots = [c / (2 * b)] if b != 0 else []
    else:
        discriminant = b * b - a * c
        # Rounding can push the discriminant of a noiseless ratio just below zero.
        if discriminant < 0 and discriminant > -1e-12 * b * b:
            discriminant = 0.0
        roots = [(b + sign * math.sqrt(discriminant)) / a for sign in (-1, 1)] if discriminant >= 0 else []
    estimate = mean_gain / mean_cost
    tolerance = 1e-9 * max(abs(estimate), 1e-300)
    below = [root for root in roots if root <= estimate + tolerance]
    above = [root for root in roots if root >= estimate - tolerance]
    # With a > 0 both roots exist, one on each side. Else cost cannot be told from zero and a side may be open.
    lower = max(below) if below else -math.inf
    upper = min(above) if above else math.inf
    return min(lower, estimate), max(upper, estimate)


def mean_bounds(values: np.ndarray, deviations: float) -> tuple[float, float]:
    """Bounds `mean -+ deviations * standard deviation` for the mean of `values` `(users,)`."""
    margin = deviations * float(values.std(ddof=1))
    return float(values.mean()) - margin, float(values.mean()) + margin


def pool_increasing(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Weighted least squares fit to `values` `(n,)` that never decreases (pool adjacent violators)."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        size = 1
        while blocks and blocks[-1][0] >= value:
            before, weight_before, size_before = blocks.pop()
            value = (before * weight_before + value * weight) / (weight_before + weight)
            weight += weight_before
            size += size_before
        blocks.append((value, weight, size))
    return np.repeat([block[0] for block in blocks], [block[2] for block in blocks])
