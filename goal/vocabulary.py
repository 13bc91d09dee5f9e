"""What a vocabulary does to the amounts it was built from, and amounts read from Parquet a row group at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from goal.errors import ConfigurationError, LogError
from goal_kernels.vocabulary import decode, encode

CHUNK = 1 << 20


@dataclass(frozen=True)
class FitStatistics:
    """Size, lengths and errors of a vocabulary on its own amounts; SOS, EOS and PAD are not counted."""

    size: int
    """Values in the vocabulary."""
    amounts: int
    zeros: int
    mean_length: float
    worst_length: int
    length_counts: tuple[int, ...]
    """How many amounts have 0, 1, 2, ... tokens."""
    worst_error: float
    """Largest difference between an amount and its decoding, in the incentive's unit: below the smallest value."""
    worst_relative_error: float
    """Largest difference as a share of its amount, zeros left out: 1 where an amount is below the smallest value."""

    def __str__(self) -> str:
        return (
            f"{self.size} values; length mean {self.mean_length:.3f}, worst {self.worst_length}; "
            f"worst error {self.worst_error:.6g}, relative {self.worst_relative_error:.3g}; "
            f"{self.amounts} amounts, {self.zeros} of them 0"
        )


def measure(
    chunks: Iterable[np.ndarray | tuple[np.ndarray, np.ndarray]], values: np.ndarray, *, max_length: int
) -> FitStatistics:
    """Encodes and decodes amounts and measures lengths and errors.

    Args:
        chunks: arrays of amounts `(N,)`, or pairs of amounts and how often each occurs, both `(N,)`.
        values: the vocabulary, `(V,)` float64, descending.
        max_length: most tokens an amount may take.

    Raises:
        ConfigurationError: an amount needs more than ``max_length`` tokens.
        ValueError: an amount is NaN, infinite or negative, or has another dtype than float64, float32 or int64.
    """
    length_counts = np.zeros(max_length + 1, dtype=np.int64)
    total = zeros = 0
    worst_error = worst_relative_error = 0.0
    for chunk in chunks:
        amounts, counts = chunk if isinstance(chunk, tuple) else (chunk, None)
        encoding = encode(amounts, values, max_length=max_length, on_overflow="truncate")
        exact = amounts.astype(np.float64)
        error = np.abs(exact - decode(encoding.tokens, values))
        if encoding.truncated:
            raise ConfigurationError(
                f"{encoding.truncated} amounts, such as {amounts[error.argmax()]}, need more than "
                f"max_length = {max_length} of the {len(values)} values: raise max_length, or raise q_start so that "
                "the largest value comes nearer to the largest amount"
            )
        if amounts.dtype == np.float32:
            # Decoding gives the multiple that a float32 amount stands for: the difference is float32's own rounding.
            error[error <= np.spacing(amounts)] = 0.0
        length_counts += np.bincount(encoding.lengths, weights=counts, minlength=max_length + 1).astype(np.int64)
        positive = exact > 0
        total += len(amounts) if counts is None else int(counts.sum())
        zeros += int((~positive).sum() if counts is None else counts[~positive].sum())
        worst_error = max(worst_error, float(error.max(initial=0.0)))
        relative = error[positive] / exact[positive]
        worst_relative_error = max(worst_relative_error, float(relative.max(initial=0.0)))
    worst_length = int(np.flatnonzero(length_counts).max(initial=0))
    return FitStatistics(
        size=len(values),
        amounts=total,
        zeros=zeros,
        mean_length=float(length_counts @ np.arange(max_length + 1)) / max(total, 1),
        worst_length=worst_length,
        length_counts=tuple(int(count) for count in length_counts[: worst_length + 1]),
        worst_error=worst_error,
        worst_relative_error=worst_relative_error,
    )


def in_chunks(amounts: np.ndarray) -> Iterator[np.ndarray]:
    """Views of a large array, so that working on it needs little memory."""
    for begin in range(0, len(amounts), CHUNK):
        yield amounts[begin : begin + CHUNK]


def parquet_amounts(path: str | Path, column: str) -> Iterator[np.ndarray]:
    """The amounts in ``column`` of a Parquet file, or of all ``*.parquet`` below a folder, one row group at a time.

    Whole numbers come as int64, float32 as float32, other floats and decimals as float64.

    Raises:
        LogError: no file, no such column, a column that is not a number, or a missing value.
    """
    root = Path(path)
    files = sorted(root.rglob("*.parquet")) if root.is_dir() else [root]
    if not files or not files[0].exists():
        raise LogError(f"no Parquet file at {root}: pass a file, or a folder that holds *.parquet")
    for file in files:
        try:
            with pq.ParquetFile(file) as table:
                if column not in table.schema_arrow.names:
                    raise LogError(f"{file} has no column {column!r}, it has {', '.join(table.schema_arrow.names)}")
                for group in range(table.num_row_groups):
                    values = table.read_row_group(group, columns=[column]).column(0)
                    yield _to_amounts(values, f"column {column!r} in row group {group} of {file}")
        except pa.ArrowInvalid as error:
            raise LogError(f"cannot read {file} as Parquet: {error}") from error


def _to_amounts(values: pa.ChunkedArray, where: str) -> np.ndarray:
    if values.null_count:
        raise LogError(f"{where} has {values.null_count} missing values: fill them with 0 or drop their rows")
    kind = values.type
    if pa.types.is_integer(kind):
        values = values.cast(pa.int64())
    elif pa.types.is_decimal(kind):
        # Arrow multiplies by a rounded power of ten, and so misses the nearest double that "0.29" reads as.
        scale = 10.0**kind.scale
        return np.rint(values.cast(pa.float64()).to_numpy() * scale) / scale
    elif pa.types.is_float16(kind):
        values = values.cast(pa.float64())
    elif not pa.types.is_floating(kind):
        raise LogError(f"{where} has type {kind}, expected numbers")
    return values.to_numpy()
