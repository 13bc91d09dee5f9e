"""Which column of a log means what, as a typed object that TOML can spell."""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from goal.errors import SchemaError

ObjectiveKind = Literal["binary", "amount"]
RESERVED = ("revenue", "cost", "fused", "later", "surprise")
"""Names that reports and losses use for what every log has."""


def suggestion(name: str, available: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the closest of ``available``, or the empty string."""
    close = difflib.get_close_matches(name, list(available), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


@dataclass(frozen=True)
class Objective:
    """A further outcome of an event, beside the revenue: a click, a return, minutes watched.

    Args:
        name: column of the log.
        kind: ``"binary"`` (0 or 1) or ``"amount"`` (non-negative).
    """

    name: str
    kind: ObjectiveKind = "binary"

    def __post_init__(self) -> None:
        _require_text("objectives.name", self.name)
        if self.name in RESERVED:
            raise SchemaError(
                f"objective {self.name!r}: the name is taken ({', '.join(RESERVED)}); rename the column in the log"
            )
        if self.kind not in get_args(ObjectiveKind):
            raise SchemaError(
                f"objective {self.name!r}: kind is {self.kind!r}; expected 'binary' (0 or 1) or 'amount' (non-negative)"
            )


@dataclass(frozen=True)
class Schema:
    """The roles that the columns of an interaction log play.

    A row is one decision: which user, when, what was known before (features), what was paid (incentive) and what came
    of it (revenue, cost, further objectives). Features must be known before the decision: a column that is filled in
    later leaks the outcome into the policy's input, and no check can see that.

    Args:
        user: column of the user's id (integers or text).
        time: column of the time (timestamps, dates, or plain numbers).
        incentive: column of the amount paid, in ``incentive_unit``.
        revenue: column of the revenue, in ``currency``.
        order: column that orders events of one user at one time; without it equal times are an error. It may also be a
            numeric feature.
        numeric: columns of numeric features; a missing value is allowed.
        categorical: columns of categorical features (text, integers or booleans); a missing value is allowed.
        cost: column of the cost, in ``currency``; None: cost = incentive * ``cost_rate``.
        cost_rate: cost of one unit of incentive. With a ``cost`` column it is the rule for amounts that were never
            logged (docs/decisions.md 15); without a ``cost`` column it defaults to 1.
        objectives: further outcomes.
        multiplier: column of the constraint multiplier in force, where it was logged.
        propensity: column of the probability with which the logged amount was chosen, in (0, 1].
        horizon: length of an episode where it is fixed: a user's ``horizon``-th event ends the episode.
        clock: numeric feature that only tells which share of the episode has passed: (place in the episode) / horizon,
            a number in [0, 1] at every event. Naming it says that what a user does depends on their history and not on
            the clock, so that a state met early also teaches what it is worth late; needs ``horizon``.
        incentive_unit: unit of amounts, for reports.
        currency: unit of revenue and cost, for reports.

    Raises:
        SchemaError: a field has the wrong type, or one column plays two roles that exclude each other.
    """

    user: str
    time: str
    incentive: str
    revenue: str
    order: str | None = None
    numeric: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    cost: str | None = None
    cost_rate: float | None = None
    objectives: tuple[Objective, ...] = ()
    multiplier: str | None = None
    propensity: str | None = None
    horizon: int | None = None
    clock: str | None = None
    incentive_unit: str = "units"
    currency: str = "units"

    def __post_init__(self) -> None:
        for name in ("user", "time", "incentive", "revenue", "incentive_unit", "currency"):
            _require_text(name, getattr(self, name))
        for name in ("order", "cost", "multiplier", "propensity"):
            if getattr(self, name) is not None:
                _require_text(name, getattr(self, name))
        for name in ("numeric", "categorical"):
            object.__setattr__(self, name, _require_names(name, getattr(self, name)))
        object.__setattr__(self, "objectives", _require_objectives(self.objectives))
        if self.cost_rate is not None:
            if isinstance(self.cost_rate, bool) or not isinstance(self.cost_rate, (int, float)):
                raise SchemaError(f"schema: cost_rate is {self.cost_rate!r}; expected a number, the cost of one unit")
            if not (math.isfinite(self.cost_rate) and self.cost_rate > 0):
                raise SchemaError(f"schema: cost_rate is {self.cost_rate!r}; expected a finite positive number")
            object.__setattr__(self, "cost_rate", float(self.cost_rate))
        if self.horizon is not None and (
            isinstance(self.horizon, bool) or not isinstance(self.horizon, int) or self.horizon < 1
        ):
            raise SchemaError(
                f"schema: horizon is {self.horizon!r}; expected a positive whole number of events, or none"
            )
        if self.clock is not None and (self.clock not in self.numeric or self.horizon is None):
            raise SchemaError(
                f"schema: clock is {self.clock!r}; expected one of the numeric features {list(self.numeric)}, and a "
                "horizon"
            )
        self._require_separate_roles()

    def _require_separate_roles(self) -> None:
        roles: dict[str, str] = {}
        for role, column in self._roles():
            earlier = roles.get(column)
            if earlier is None or (earlier == "order" and role == "numeric"):
                roles[column] = role
                continue
            if role in ("numeric", "categorical") and earlier not in ("numeric", "categorical"):
                raise SchemaError(
                    f"schema: column {column!r} is both {earlier} and a {role} feature. Features must be known before "
                    f"the decision and enter on their own; take {column!r} out of {role}"
                )
            raise SchemaError(f"schema: column {column!r} is both {earlier} and {role}; name each column once")

    def _roles(self) -> Iterable[tuple[str, str]]:
        for role in ("user", "time", "order", "incentive", "revenue", "cost", "multiplier", "propensity"):
            if getattr(self, role) is not None:
                yield role, getattr(self, role)
        yield from (("objective", objective.name) for objective in self.objectives)
        yield from (("numeric", name) for name in self.numeric)
        yield from (("categorical", name) for name in self.categorical)

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that the log must have, each once."""
        return tuple(dict.fromkeys(column for _, column in self._roles()))

    @property
    def outcome_names(self) -> tuple[str, ...]:
        """Names along the last axis of outcomes: the revenue, then the objectives."""
        return (self.revenue, *(objective.name for objective in self.objectives))

    @property
    def outcome_kinds(self) -> tuple[ObjectiveKind, ...]:
        """Kinds along the last axis of outcomes; revenue is an amount."""
        return ("amount", *(objective.kind for objective in self.objectives))

    @property
    def known_cost_rate(self) -> float | None:
        """Cost of one unit for an amount that was never logged; None: nobody said, so the cost must be fitted."""
        if self.cost_rate is not None:
            return self.cost_rate
        return 1.0 if self.cost is None else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON or TOML, without the fields that are None or empty."""
        result: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "objectives":
                value = [{"name": objective.name, "kind": objective.kind} for objective in value]
            elif isinstance(value, tuple):
                value = list(value)
            if value is not None and value != []:
                result[field.name] = value
        return result

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Schema:
        """Build a schema from plain values.

        Raises:
            SchemaError: a key is unknown or missing, or a value has the wrong type.
        """
        names = [field.name for field in fields(cls)]
        for key in values:
            if key not in names:
                raise SchemaError(
                    f"schema: unknown key {key!r}.{suggestion(key, names)} Known keys: {', '.join(names)}"
                )
        missing = [name for name in ("user", "time", "incentive", "revenue") if name not in values]
        if missing:
            raise SchemaError(f"schema: {', '.join(missing)} missing; a log needs user, time, incentive and revenue")
        return cls(**values)

    @classmethod
    def load(cls, path: str | Path) -> Schema:
        """Read a schema from a TOML file whose keys are the fields of this class.

        Raises:
            SchemaError: the file is absent, is not TOML, or does not spell a schema; the message names the file.
        """
        path = Path(path)
        try:
            with path.open("rb") as file:
                values = tomllib.load(file)
        except OSError as error:
            raise SchemaError(f"{path}: cannot read the schema: {error.strerror or error}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SchemaError(f"{path}: not a TOML file: {error}") from error
        try:
            return cls.from_dict(values)
        except SchemaError as error:
            raise SchemaError(f"{path}: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write the schema as TOML; ``load`` gives it back."""
        values = self.to_dict()
        objectives = values.pop("objectives", [])
        # JSON's strings, numbers and lists of strings are TOML's as well.
        lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
        for objective in objectives:
            lines += ["", "[[objectives]]"]
            lines += [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in objective.items()]
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _require_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value.strip():
        raise SchemaError(f"schema: {name} is {value!r}; expected a non-empty text")


def _require_names(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        raise SchemaError(f"schema: {name} is {value!r}; expected a list of column names")
    for item in value:
        _require_text(name, item)
    return tuple(value)


def _require_objectives(value: object) -> tuple[Objective, ...]:
    if isinstance(value, (str, Mapping)) or not isinstance(value, (list, tuple)):
        raise SchemaError(
            f"schema: objectives is {value!r}; expected a list of objectives, in TOML a table [[objectives]] each"
        )
    objectives = []
    for item in value:
        if isinstance(item, Objective):
            objectives.append(item)
            continue
        if not isinstance(item, Mapping):
            raise SchemaError(f"schema: objective {item!r}; expected a table with the keys name and kind")
        unknown = [key for key in item if key not in ("name", "kind")]
        if unknown or "name" not in item:
            raise SchemaError(f"schema: objective {dict(item)!r}; expected the keys name and kind")
        objectives.append(Objective(**item))
    return tuple(objectives)
