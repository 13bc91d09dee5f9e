"""What a policy leaves on the table."""

from __future__ import annotations

import math

from goal.errors import ConfigurationError


def regret(value: float, *, oracle: float) -> float:
    """`oracle - value`, in money per interaction. Lower is better.

    A sampled value can exceed the oracle's expectation, so small negative regrets are sampling error.

    Args:
        value: The policy's `revenue - multiplier * cost` per interaction.
        oracle: The best possible value.

    Raises:
        ConfigurationError: A value is not finite.

    >>> regret(4.0, oracle=4.5)
    0.5
    """
    for name, given in (("value", value), ("oracle", oracle)):
        if not math.isfinite(given):
            raise ConfigurationError(f"{name} is {given}: expected a finite number")
    return oracle - value
