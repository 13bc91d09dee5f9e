"""Average revenue (REV)."""

from __future__ import annotations

from numpy.typing import ArrayLike

from goal.evaluation.metrics._checks import values


def rev(revenue: ArrayLike) -> float:
    """Average revenue per interaction, `REV = sum(r) / N`. Higher is better.

    Source: "Evaluation Metrics" of the paper.

    Args:
        revenue: Any shape, revenue of each interaction in money.

    Raises:
        ConfigurationError: `revenue` is empty or not finite.

    >>> rev([0.0, 30.0, 0.0, 30.0])
    15.0
    """
    return float(values("revenue", revenue).mean())
