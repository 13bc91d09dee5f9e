"""Return of what was gained over never paying."""

from __future__ import annotations

import math

from numpy.typing import ArrayLike

from goal.evaluation.metrics._checks import revenue_and_cost, values


def incremental_roi(revenue: ArrayLike, cost: ArrayLike, *, baseline: ArrayLike) -> float:
    """Revenue gained over never paying per unit of cost, `(mean r - mean b) / mean c`. Higher is better.

    The plain ROI credits a policy with the revenue that comes without any payment; this one does not.

    Args:
        revenue: Any shape, revenue of each interaction in money.
        cost: The same shape, its cost in money, at least 0.
        baseline: Any shape, revenue of each interaction when nobody is ever paid. It may cover another number of
            interactions, since averages are compared.

    Returns:
        The ratio; `nan` where nothing was paid, because then no payment gained or lost anything.

    Raises:
        ConfigurationError: Shapes of revenue and cost differ, or a value is not finite or a cost negative.

    >>> incremental_roi([0.0, 30.0, 0.0, 30.0], [5.0, 5.0, 5.0, 5.0], baseline=[0.0, 0.0, 0.0, 8.0])
    2.6
    """
    revenue, cost = revenue_and_cost(revenue, cost)
    gain = float(revenue.mean()) - float(values("baseline", baseline).mean())
    mean_cost = float(cost.mean())
    return gain / mean_cost if mean_cost > 0 else math.nan
