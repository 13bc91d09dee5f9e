"""What a vocabulary does to the amounts it was built from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from goal.errors import ConfigurationError
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
