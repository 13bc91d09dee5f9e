"""Integer codes for the distinct values of a column that comes batch by batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from goal.log.conversion import pc


class Codes:
    """Distinct values in the order of their first appearance; the code of a value is its place in it.

    Args:
        settled: the values, where they are settled already; any other is then unknown.
    """

    def __init__(self, settled: Sequence[str] | None = None) -> None:
        self.settled = settled is not None
        self.values: Any = None if settled is None else pa.array(settled, pa.large_string())

    def encode(self, column: pa.Array) -> np.ndarray:
        """Return int64 codes; -1 for null and for an unknown value."""
        encoded = column.dictionary_encode()
        batch = encoded.dictionary
        if self.values is None:
            self.values = batch.slice(0, 0)
        codes = np.full(len(batch) + 1, -1, dtype=np.int64)  # the last entry answers for null
        codes[:-1] = pc.index_in(batch, value_set=self.values).fill_null(-1).to_numpy(zero_copy_only=False)
        new = codes[:-1] < 0
        if not self.settled and new.any():
            codes[:-1][new] = len(self.values) + np.arange(np.count_nonzero(new))
            self.values = pa.concat_arrays([self.values, batch.filter(pa.array(new))])
        return codes[encoded.indices.fill_null(len(batch)).to_numpy(zero_copy_only=False)]

    def to_integers(self) -> None:
        """Turn text into integers where that loses nothing: ``"17"``, but not ``"017"``."""
        try:
            integers = self.values.cast(pa.int64())
        except pa.ArrowInvalid:
            return
        if integers.cast(pa.large_string()).equals(self.values):
            self.values = integers

    def sorted(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the values, ascending unless they were settled, and the place of each code among them."""
        values = pa.array([], pa.large_string()) if self.values is None else self.values
        order = np.arange(len(values)) if self.settled else pc.array_sort_indices(values).to_numpy().astype(np.int64)
        places = np.empty(len(values), dtype=np.int64)
        places[order] = np.arange(len(values))
        values = values.take(pa.array(order))
        if pa.types.is_integer(values.type):
            return values.to_numpy(), places
        return np.array(values.to_pylist(), dtype=np.str_), places
