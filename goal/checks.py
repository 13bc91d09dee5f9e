"""Checks that settings make of their own fields."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin, get_type_hints

from goal.errors import ConfigurationError


def require(condition: bool, name: str, value: object, expected: str) -> None:
    """Refuse a value of a field.

    Raises:
        ConfigurationError: the condition does not hold; the message names field, value and what is expected.
    """
    if not condition:
        raise ConfigurationError(f"{name}={value!r}: expected {expected}")


def require_each(config: object, names: str, accepts: Callable[[Any], bool], expected: str) -> None:
    """`require` of each of the fields that ``names`` lists, between blanks."""
    for name in names.split():
        require(accepts(getattr(config, name)), name, getattr(config, name), expected)


def require_choices(config: object) -> None:
    """Every field that is a Literal holds one of its values."""
    for name, hint in get_type_hints(type(config)).items():
        if get_origin(hint) is Literal:
            *others, last = map(repr, get_args(hint))
            value = getattr(config, name)
            require(value in get_args(hint), name, value, f"{', '.join(others)} or {last}")


def require_counts(config: object, names: str) -> None:
    """Each is at least 1."""
    require_each(config, names, lambda value: value >= 1, "at least 1")


def require_positive(config: object, names: str) -> None:
    """Each is positive and finite."""
    require_each(config, names, lambda value: 0 < value < math.inf, "positive and finite")


def require_not_negative(config: object, names: str) -> None:
    """Each is finite and at least 0."""
    require_each(config, names, lambda value: 0 <= value < math.inf, "finite and at least 0")
