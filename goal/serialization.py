"""Settings as JSON, and back."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from goal.errors import ConfigurationError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")


def to_dict(config: Any) -> dict[str, Any]:
    """Return a config as plain dictionaries, for JSON."""
    return dataclasses.asdict(config)


def from_dict(
    kind: type[Config], values: Mapping[str, Any], *, source: str | Path | None = None, remedy: str | None = None
) -> Config:
    """Build a config of type ``kind`` from what ``to_dict`` wrote, nested configs included.

    Args:
        kind: a dataclass.
        values: by field; lists stand for tuples.
        source: where the values come from, and
        remedy: what to do where they cannot work, for the message.

    Raises:
        ConfigurationError: a key that ``kind`` does not have or misses, or a value of another type or that cannot work.
    """
    try:
        return _build(kind, values)
    except ConfigurationError as error:
        if source is None and remedy is None:
            raise
        raise ConfigurationError(
            (f"{source}: " if source else "") + str(error) + (f"; {remedy}" if remedy else "")
        ) from error


def _build(kind: type[Config], values: Mapping[str, Any]) -> Config:
    hints = get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise ConfigurationError(f"{kind.__name__}: unknown setting {unknown[0]!r}; it has {', '.join(sorted(fields))}")
    for name, field in fields.items():
        if name not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise ConfigurationError(f"{kind.__name__}: the setting {name!r} is missing; it is a {field.type}")
    arguments = {}
    for name, value in values.items():
        try:
            arguments[name] = _as(hints[name], value)
        except TypeError as error:
            raise ConfigurationError(
                f"{kind.__name__}: {name}={value!r}: a {type(value).__name__} came; expected {fields[name].type}"
            ) from error
    return kind(**arguments)


def _as(hint: Any, value: Any) -> Any:
    """``value`` as the type of a field; TypeError where it is of another."""
    origin, options = get_origin(hint), get_args(hint)
    if hasattr(hint, "__dataclass_fields__"):
        if isinstance(value, Mapping):
            return _build(hint, value)
    elif origin in (Union, types.UnionType):
        for option in options:
            try:
                return _as(option, value)
            except TypeError:
                continue
    elif origin is tuple:
        if isinstance(value, (list, tuple)):
            return tuple(_as(options[0], item) for item in value)
    elif origin is Literal:
        return value  # the config says which words it knows
    elif hint is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return value
    elif isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise TypeError


def read_json(path: Path, *, remedy: str, fields: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        path: of the file.
        remedy: what to do where it cannot be used, for the message.
        fields: that it must have, and their types, as those of a config's fields.

    Raises:
        ConfigurationError: the file is absent, is broken or holds something else; the message names it and the
            ``remedy``.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigurationError(f"{path}: not found; {remedy}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: not JSON: {error}; {remedy}") from error
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path}: holds a {type(values).__name__}; expected a JSON object; {remedy}")
    for name, hint in (fields or {}).items():
        try:
            _as(hint, values.get(name))
        except TypeError as error:
            raise ConfigurationError(
                f"{path}: {name}={values.get(name)!r}; expected {getattr(hint, '__qualname__', hint)}; {remedy}"
            ) from error
    return values


def dumps(config: Any) -> str:
    """Return a config as JSON text."""
    return json.dumps(to_dict(config), indent=2)
