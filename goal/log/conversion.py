"""One column of a batch, from whatever type it came in to a checked NumPy array.

Every message names the column, the row and the value, because a log of millions of rows is mended row by row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from goal.errors import LogError

pc: Any = pyarrow.compute  # its functions are made at import, where a type checker does not see them
_MISSING_TEXT = pa.array(
    ["", "NA", "N/A", "na", "n/a", "NULL", "Null", "null", "None", "NaN", "nan"], pa.large_string()
)
_PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}


@dataclass(frozen=True)
class Place:
    """Where a batch came from: row ``i`` of it is row ``first + i`` (counting from 0) of ``label``."""

    first: int = 0
    label: str = ""

    def row(self, index: int) -> str:
        return f"row {self.first + int(index)}" + (f" of {self.label}" if self.label else "")


def plain(column: pa.Array) -> pa.Array:
    """Return the column without dictionary encoding and with one kind of text."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_string(column.type) or pa.types.is_string_view(column.type):
        column = column.cast(pa.large_string())
    return column


def from_numpy(name: str, values: np.ndarray) -> pa.Array:
    """Return an Arrow array of a plain NumPy array.

    Raises:
        LogError: the array is not one-dimensional, or holds values of several types.
    """
    array = np.asarray(values)
    if array.ndim != 1:
        raise LogError(f"column {name!r}: has shape {array.shape}; expected one dimension, a value an event")
    try:
        return pa.array(array, from_pandas=True)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        known = [(i, value) for i, value in enumerate(array.tolist()) if value is not None]
        for i, value in known:
            if type(value) is not type(known[0][1]):
                raise LogError(
                    f"column {name!r}, row {i}: mixed types: {value!r} is a {type(value).__name__} where row "
                    f"{known[0][0]} holds a {type(known[0][1]).__name__}; give the column one type"
                ) from error
        raise LogError(f"column {name!r}: cannot be read as a column of one type: {error}") from error


def numbers(name: str, column: pa.Array, place: Place) -> np.ndarray:
    """Return float64 values, NaN where missing; text that spells numbers is parsed, and booleans are 0 and 1.

    Raises:
        LogError: a value is not a number.
    """
    column = plain(column)
    kind = column.type
    if pa.types.is_null(kind):
        return np.full(len(column), np.nan)
    if pa.types.is_large_string(kind):
        column = _present(column)
        if _casts(column, pa.bool_()) and not _casts(column, pa.float64()):  # "true" and "false", as CSV writers put it
            column = column.cast(pa.bool_())
        else:
            column = _parse(name, column, pa.float64(), place, "a number")
        kind = column.type
    if pa.types.is_boolean(kind):
        return _to_float(column.cast(pa.int8()).cast(pa.float64()))
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        values = _to_float(column.cast(pa.float64(), safe=False))
        if pa.types.is_decimal(kind):
            return nearest_decimals(values, kind.scale)
        return shortest(values) if kind.bit_width < 64 and pa.types.is_floating(kind) else values
    raise LogError(f"column {name!r}, {place.row(0)}: has the type {kind}; expected numbers, so convert the column")


def nearest_decimals(values: np.ndarray, scale: int) -> np.ndarray:
    """Decimals `(n,)` of ``scale`` places that Arrow made float64, as the nearest doubles, which "0.29" reads as.

    Arrow multiplies by a rounded power of ten and so misses some of them.
    """
    return np.rint(values * 10.0**scale) / 10.0**scale


def shortest(values: np.ndarray) -> np.ndarray:
    """Numbers `(n,)` that came as float32, as the shortest decimals that are stored alike: .29, not .28999999."""
    stored, found = values.astype(np.float32), values.copy()
    for decimals in reversed(range(8)):
        rounded = np.round(values, decimals)
        np.copyto(found, rounded, where=rounded.astype(np.float32) == stored)
    return found


def order_keys(name: str, column: pa.Array, place: Place) -> tuple[np.ndarray, str]:
    """Return values that only order, and their kind: ``"times"``, ``"whole numbers"`` or ``"fractions"``.

    Whole numbers are int64 (float64 would merge ids above 2**53), and so are times, as nanoseconds since 1970: files of
    one log may store them in different units.

    Raises:
        LogError: a value is missing, is not a finite number, or is out of the range of int64.
    """
    column = plain(column)
    kind = column.type
    if pa.types.is_large_string(kind):
        try:
            column = pc.utf8_trim_whitespace(column).cast(pa.int64())
            kind = column.type
        except pa.ArrowInvalid:
            column = _parse(name, column, pa.float64(), place, "a number")
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise LogError(f"column {name!r}, {place.row(row)}: the order is missing; every event needs one")
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        zone = kind.tz if pa.types.is_timestamp(kind) else None
        times = _in_range(name, column, pa.timestamp("ns", zone), place, "a time from 1678 to 2261")
        return times.cast(pa.int64()).to_numpy(), "times"
    if pa.types.is_integer(kind):
        return _in_range(name, column, pa.int64(), place, "a whole number below 2**63").to_numpy(), "whole numbers"
    values = numbers(name, column, place)
    require(name, values, np.isfinite(values), place, "a finite number")
    return values, "fractions"


def _in_range(name: str, column: pa.Array, kind: pa.DataType, place: Place, expected: str) -> pa.Array:
    try:
        return column.cast(kind)
    except pa.ArrowInvalid:
        row = first_failure(column, kind)
        raise LogError(
            f"column {name!r}, {place.row(row)}: {column[row]} came; expected {expected}; number the events instead"
        ) from None


def seconds(name: str, column: pa.Array, place: Place) -> tuple[np.ndarray, str]:
    """Return times as float64 and their kind: ``"timestamp"`` (seconds since 1970, UTC) or ``"number"`` (as given).

    Timestamps of any unit and zone, dates, and ISO 8601 text are timestamps; a timestamp without zone counts as UTC.

    Raises:
        LogError: a time is missing, not finite, or cannot be parsed.
    """
    column = plain(column)
    kind = "timestamp"
    if pa.types.is_large_string(column.type):
        column, kind = _parse_times(name, pc.utf8_trim_whitespace(column), place)
    if pa.types.is_timestamp(column.type):
        values = _to_float(column.cast(pa.int64()).cast(pa.float64(), safe=False)) / _PER_SECOND[column.type.unit]
    elif pa.types.is_date32(column.type):
        values = _to_float(column.cast(pa.int32()).cast(pa.float64())) * 86400.0
    elif pa.types.is_date64(column.type):
        values = _to_float(column.cast(pa.int64()).cast(pa.float64(), safe=False)) / 1e3
    else:
        values, kind = numbers(name, column, place), "number"
    require(name, values, np.isfinite(values), place, "a time: a timestamp, a date or a finite number")
    return values, kind


def keys(name: str, column: pa.Array, place: Place) -> tuple[pa.Array, str]:
    """Return user ids as int64 or text, and which: ``"integer"`` or ``"text"``.

    Raises:
        LogError: an id is missing or empty, or is neither a whole number nor text.
    """
    column = plain(column)
    kind = column.type
    if pa.types.is_floating(kind) or pa.types.is_integer(kind):
        values = column
        if pa.types.is_floating(kind):  # a nullable integer column arrives as floats from some tools
            values = pc.if_else(pc.is_nan(column), None, column)
        _require_present(name, values, place)
        try:
            return values.cast(pa.int64()), "integer"
        except pa.ArrowInvalid:
            row = first_failure(values, pa.int64())
            value = values[row].as_py()
            raise LogError(
                f"column {name!r}, {place.row(row)}: user {value!r} is not a whole number in the range of int64; "
                "give ids as whole numbers or text"
            ) from None
    if pa.types.is_null(kind) or pa.types.is_large_string(kind):
        _require_present(name, column, place)
        empty = pc.equal(pc.utf8_length(pc.utf8_trim_whitespace(column)), 0).to_numpy(zero_copy_only=False)
        if empty.any():
            raise LogError(
                f"column {name!r}, {place.row(int(np.argmax(empty)))}: the user is empty; give each event its user"
            )
        return column, "text"
    raise LogError(f"column {name!r}, {place.row(0)}: has the type {kind}; expected ids as whole numbers or text")


def labels(name: str, column: pa.Array, place: Place) -> pa.Array:
    """Return a categorical feature as text, null where missing.

    Raises:
        LogError: a value is a fraction, which belongs among the numeric features.
    """
    column = plain(column)
    kind = column.type
    if pa.types.is_floating(kind):
        column = pc.if_else(pc.is_nan(column), None, column)
        try:
            column = column.cast(pa.int64())
        except pa.ArrowInvalid:
            row = first_failure(column, pa.int64())
            raise LogError(
                f"column {name!r}, {place.row(row)}: {column[row].as_py()!r} is not a category; list a column of "
                "fractions under numeric"
            ) from None
    if pa.types.is_large_string(kind):
        return pc.if_else(pc.equal(pc.utf8_length(column), 0), None, column)
    try:
        return column.cast(pa.large_string())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise LogError(
            f"column {name!r}, {place.row(0)}: has the type {kind}; expected text, whole numbers or booleans"
        ) from error


def require(name: str, values: np.ndarray, good: np.ndarray, place: Place, expected: str) -> None:
    """Raise LogError for the first value that is not good."""
    if good.all():
        return
    row = int(np.argmin(good))
    value = float(values[row])
    shown = "the value is missing (null or NaN)" if np.isnan(value) else f"{_shown(value)} came"
    raise LogError(f"column {name!r}, {place.row(row)}: {shown}; expected {expected}")


def first_failure(column: pa.Array, kind: pa.DataType) -> int:
    """Return the first row that does not cast to ``kind``, given that one does not."""
    low, high = 0, len(column)
    while high - low > 1:
        middle = (low + high) // 2
        if _casts(column.slice(low, middle - low), kind):
            low = middle
        else:
            high = middle
    return low


def _casts(column: pa.Array, kind: pa.DataType) -> bool:
    try:
        column.cast(kind)
    except pa.ArrowInvalid:
        return False
    return True


def _parse_times(name: str, column: pa.Array, place: Place) -> tuple[pa.Array, str]:
    choices = (
        (pa.float64(), "number"),
        (pa.timestamp("ns"), "timestamp"),
        (pa.timestamp("ns", "UTC"), "timestamp"),
    )
    for kind, family in choices:
        try:
            return column.cast(kind), family
        except pa.ArrowInvalid:
            continue
    # The first value says how the column spells its times; the culprit is the first that departs from it.
    kind = next((kind for kind, _ in choices if _casts(column.slice(0, 1), kind)), pa.timestamp("ns"))
    row = first_failure(column, kind)
    raise LogError(
        f"column {name!r}, {place.row(row)}: {column[row].as_py()!r} cannot be read as a time; expected ISO 8601 such "
        "as 2024-01-31T18:30:00 (all with a zone or all without) or a number, one spelling in the whole column"
    )


def _parse(name: str, column: pa.Array, kind: pa.DataType, place: Place, expected: str) -> pa.Array:
    trimmed = pc.utf8_trim_whitespace(column)
    try:
        return trimmed.cast(kind)
    except pa.ArrowInvalid:
        row = first_failure(trimmed, kind)
        raise LogError(f"column {name!r}, {place.row(row)}: {column[row].as_py()!r} is not {expected}") from None


def _present(column: pa.Array) -> pa.Array:
    """Replace the usual spellings of a missing value by null."""
    return pc.if_else(pc.is_in(pc.utf8_trim_whitespace(column), value_set=_MISSING_TEXT), None, column)


def _require_present(name: str, column: pa.Array, place: Place) -> None:
    if column.null_count:
        row = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
        raise LogError(f"column {name!r}, {place.row(row)}: the user is missing (null); give each event its user")


def _to_float(column: pa.Array) -> np.ndarray:
    return column.fill_null(np.nan).to_numpy(zero_copy_only=False)


def _shown(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)


def non_negative(values: np.ndarray) -> np.ndarray:
    """Say which values are finite and not negative."""
    return (values >= 0) & (values < np.inf)
