"""Return on investment (ROI)."""

from __future__ import annotations

import math

from numpy.typing import ArrayLike

from goal.evaluation.metrics._checks import revenue_and_cost


def roi(revenue: ArrayLike, cost: ArrayLike) -> float:
    """Total revenue per unit of total cost, `ROI = sum(r) / sum(c)`. Higher is better, but see below.

    Source: "Evaluation Metrics" of the paper. A policy that pays nothing has an infinite ROI, so read it beside the
    average revenue and `incremental_roi`.

    Args:
        revenue: Any shape, revenue of each interaction in money.
        cost: The same shape, its cost in money, at least 0.

    Returns:
        The ratio; `inf` where nothing was paid.

    Raises:
        ConfigurationError: Shapes differ, or a value is not finite or a cost negative.

    >>> roi([0.0, 30.0, 0.0, 30.0], [5.0, 5.0, 5.0, 5.0])
    3.0
    >>> roi([1.0], [0.0])
    inf
    """
    revenue, cost = revenue_and_cost(revenue, cost)
    total = float(cost.sum())
    return float(revenue.sum()) / total if total > 0 else math.inf
