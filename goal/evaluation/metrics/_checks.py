"""Checks that the measures share."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from goal.errors import ConfigurationError


def values(name: str, given: ArrayLike) -> NDArray[np.float64]:
    """`given` as float64, finite and not empty."""
    array = np.asarray(given, dtype=np.float64)
    if array.size == 0:
        raise ConfigurationError(f"{name} is empty: expected at least one interaction")
    if not np.isfinite(array).all():
        raise ConfigurationError(f"{name} holds NaN or infinity: remove or fill those interactions first")
    return array


def revenue_and_cost(revenue: ArrayLike, cost: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Both as float64 of one shape, finite, costs of at least 0."""
    revenue, cost = values("revenue", revenue), values("cost", cost)
    if revenue.shape != cost.shape:
        raise ConfigurationError(f"revenue has shape {revenue.shape} and cost {cost.shape}: expected the same shape")
    if (cost < 0).any():
        raise ConfigurationError(f"cost holds {cost.min()}: expected costs of at least 0")
    return revenue, cost
