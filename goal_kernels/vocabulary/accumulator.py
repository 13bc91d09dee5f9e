"""Amounts that do not fit in memory, or lie on many machines, gathered for one vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np

from goal_kernels.vocabulary.checks import amounts_array, positive_integer
from goal_kernels.vocabulary.native import native

DEFAULT_CAPACITY = 1 << 20


class VocabularyAccumulator:
    """Counts amounts in bounded memory; adding and merging are associative and order-free, to the byte.

    With at most ``capacity`` distinct amounts (any realistic grid of coins or cents) it is exact: `build` gives what
    `build_vocabulary` gives on all amounts at once. Beyond that it drops trailing bits of the amounts' mantissas, as
    few as bring the number of distinct ones under ``capacity``; each cell is represented by the smallest amount seen
    in it. An amount is then off by less than `relative_resolution` of itself, and a percentile falls on an amount
    whose rank is off by at most `rank_error`.

    Args:
        capacity: distinct amounts to keep, at least 2048; about 40 bytes each.

    Example:
        >>> import numpy as np
        >>> first, second = VocabularyAccumulator(), VocabularyAccumulator()
        >>> first.add(np.array([0, 1, 2]))
        >>> second.add(np.array([5, 5, 7]))
        >>> first.merge(VocabularyAccumulator.from_bytes(second.to_bytes()))
        >>> first.build().tolist()
        [7.0, 5.0, 2.0, 1.0]
    """

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self._native = native().Accumulator(positive_integer("capacity", capacity))

    def add(self, values: Any) -> None:
        """Adds a chunk of amounts `(N,)` float64, float32 or int64; a chunk with a bad amount adds nothing.

        Raises:
            ValueError: NaN, infinite or negative amounts; another dtype.
        """
        self._native.add(amounts_array(values))

    def merge(self, other: VocabularyAccumulator) -> None:
        """Adds everything that ``other`` holds.

        Raises:
            ValueError: ``other`` has another capacity.
        """
        if not isinstance(other, VocabularyAccumulator):
            raise TypeError(f"other is a {type(other).__name__}, expected a VocabularyAccumulator")
        self._native.merge(other._native)

    def to_bytes(self) -> bytes:
        """The state; equal bytes for equal amounts, however they were split and ordered."""
        return self._native.to_bytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> VocabularyAccumulator:
        """Reads what `to_bytes` gave.

        Raises:
            ValueError: ``data`` is something else, or incomplete.
        """
        if not isinstance(data, bytes):
            raise TypeError(f"data is a {type(data).__name__}, expected bytes")
        accumulator = cls.__new__(cls)
        accumulator._native = native().Accumulator.from_bytes(data)
        return accumulator

    def build(
        self,
        *,
        q_start: float = 0.9999,
        q_end: float = 0.9,
        decay: float = 0.99,
        relative_error: float = 1e-3,
        min_unit: float = 1.0,
        max_tokens: int = 512,
    ) -> np.ndarray:
        """The vocabulary of all amounts so far; options, result and errors as in `build_vocabulary`."""
        return self._native.build(
            q_start=float(q_start),
            q_end=float(q_end),
            decay=float(decay),
            relative_error=float(relative_error),
            min_unit=float(min_unit),
            max_tokens=positive_integer("max_tokens", max_tokens),
        )

    def counted(self) -> tuple[np.ndarray, np.ndarray]:
        """Distinct positive amounts, ascending, float64, and how often each occurs, uint64."""
        return self._native.counted()

    @property
    def amounts(self) -> int:
        """Amounts added, zeros included."""
        return self._native.positives + self._native.zeros

    @property
    def zeros(self) -> int:
        """Zeros added."""
        return self._native.zeros

    @property
    def capacity(self) -> int:
        """Distinct amounts it keeps."""
        return self._native.capacity

    @property
    def exact(self) -> bool:
        """Whether every distinct amount is still told apart."""
        return self._native.dropped_bits == 0

    @property
    def relative_resolution(self) -> float:
        """By which share of itself an amount may be off; 0 while exact."""
        return 0.0 if self.exact else 2.0 ** (self._native.dropped_bits - 52)

    @property
    def rank_error(self) -> float:
        """Largest share of the positive amounts that one cell stands for; 0 while exact."""
        if self.exact:
            return 0.0
        _, counts = self.counted()
        return float(counts.max()) / self._native.positives

    def __repr__(self) -> str:
        state = "exact" if self.exact else f"rank error {self.rank_error:.2g}"
        return f"VocabularyAccumulator({self.amounts} amounts, {self._native.distinct} distinct, {state})"
