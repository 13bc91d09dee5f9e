"""How much of the possible gain over the best constant amount a policy reaches."""

from __future__ import annotations

import math

from goal.errors import ConfigurationError


def share_of_gain(value: float, *, oracle: float, reference: float) -> float:
    """`(value - reference) / (oracle - reference)`: 1 is the oracle, 0 the best constant amount. Higher is better.

    A plain ratio `value / oracle` flatters: never paying alone can reach most of it. Where little is to be gained (see
    `is_gain_large`) the share is mostly noise; quote `regret` instead.

    Args:
        value: The policy's `revenue - multiplier * cost` per interaction, in money.
        oracle: The best possible value, likewise.
        reference: The value of the best constant amount, never paying included.

    Returns:
        The share, below 0 for a policy worse than the reference; `nan` where there is nothing to gain.

    Raises:
        ConfigurationError: A value is not finite.

    >>> share_of_gain(4.0, oracle=4.4, reference=1.4)
    0.8666666666666666
    """
    for name, given in (("value", value), ("oracle", oracle), ("reference", reference)):
        if not math.isfinite(given):
            raise ConfigurationError(f"{name} is {given}: expected a finite number")
    gain = oracle - reference
    # Where never paying is best, oracle and constant differ by rounding alone.
    return (value - reference) / gain if gain > 1e-9 * abs(oracle) else math.nan


def is_gain_large(*, oracle: float, reference: float) -> bool:
    """Whether a tenth of the oracle's value or more is to be gained over the best constant amount.

    Args:
        oracle: The best possible value.
        reference: The value of the best constant amount.

    >>> is_gain_large(oracle=1.0, reference=0.97)
    False
    """
    return oracle - reference >= 0.1 * abs(oracle)
