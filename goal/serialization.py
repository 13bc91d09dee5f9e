"""Settings as JSON, and back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, TypeVar, get_type_hints

from goal.errors import ConfigurationError

Config = TypeVar("Config")


def to_dict(config: Any) -> dict[str, Any]:
    """Return a config as plain dictionaries, for JSON."""
    return dataclasses.asdict(config)


def from_dict(kind: type[Config], values: Mapping[str, Any]) -> Config:
    """Build a config of type ``kind`` from what ``to_dict`` wrote, nested configs included.

    Raises:
        ConfigurationError: a key that ``kind`` does not have, or a value that cannot work.
    """
    hints = get_type_hints(kind)
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise ConfigurationError(f"{kind.__name__}: unknown setting {unknown[0]!r}; it has {', '.join(sorted(hints))}")
    arguments = {}
    for name, value in values.items():
        if dataclasses.is_dataclass(hints[name]) and isinstance(value, Mapping):
            value = from_dict(hints[name], value)
        arguments[name] = _tuples(value)
    return kind(**arguments)


def _tuples(value: Any) -> Any:
    """Lists, as JSON has them, as tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def dumps(config: Any) -> str:
    """Return a config as JSON text."""
    return json.dumps(to_dict(config), indent=2)
