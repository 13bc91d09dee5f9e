"""Numbers as text: one number of decimals a column, so that digits line up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ABSENT = "–"


@dataclass(frozen=True)
class Column:
    """Which key of the rows to show, and how.

    Args:
        key: Key of the rows.
        label: Heading.
        digits: Decimals; by default as many as make four significant digits of the largest value.
        percent: Whether the value is a share to show in per cent.
        absent: What stands for a missing value.
    """

    key: str
    label: str
    digits: int | None = None
    percent: bool = False
    absent: str = ABSENT


@dataclass(frozen=True)
class Table:
    """Text ready to print; `numeric` columns are aligned right, row `emphasised` stands out."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: Sequence[bool]
    emphasised: int | None
    kind: str = field(default="table", init=False)


def make_table(
    rows: Sequence[Mapping[str, Any]],
    columns: Sequence[Column],
    caption: str,
    *,
    emphasised: Mapping[str, Any] | None = None,
) -> Table:
    """A table of the columns that any row has a value for; the first row that matches `emphasised` stands out."""
    kept = [column for column in columns if any(row.get(column.key) is not None for row in rows)]
    texts = []
    for column in kept:
        values = [row.get(column.key) for row in rows]
        texts.append(_column(values, column))
    found = None
    if emphasised:
        matches = [i for i, row in enumerate(rows) if all(row.get(key) == value for key, value in emphasised.items())]
        found = matches[0] if matches else None
    return Table(
        caption=caption,
        header=tuple(column.label for column in kept),
        rows=tuple(zip(*texts, strict=True)) if texts else (),
        numeric=tuple(not any(isinstance(row.get(column.key), str) for row in rows) for column in kept),
        emphasised=found,
    )


def show(value: Any, digits: int | None = None) -> str:
    """A number with `digits` decimals, by default as many as make four significant digits."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ABSENT
    value = float(value)
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    text = f"{value:,.{decimals([value]) if digits is None else digits}f}"
    return text.replace("-", "−")


def show_percent(value: Any, digits: int = 1) -> str:
    """A share in per cent."""
    text = show(None if value is None else 100 * float(value), digits)
    return text if text == ABSENT else f"{text}%"


def show_whole(value: Any) -> str:
    """A count, with separators."""
    return show(value, 0)


def decimals(values: Sequence[Any]) -> int:
    """Decimals that give the largest of the values four digits, a leading zero included; whole numbers take none."""
    finite = [abs(float(value)) for value in values if value is not None and math.isfinite(value)]
    if all(value == int(value) for value in finite):
        return 0
    leading = math.floor(math.log10(max(finite)))
    return min(max(3 - leading - (leading < 0), 0), 6)


def _column(values: Sequence[Any], column: Column) -> list[str]:
    if any(isinstance(value, str) for value in values):
        return [column.absent if value is None else str(value) for value in values]
    if column.percent:
        return [column.absent if value is None else show_percent(value) for value in values]
    digits = decimals(values) if column.digits is None else column.digits
    return [column.absent if value is None else show(value, digits) for value in values]
