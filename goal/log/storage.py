"""A column that grows by appending and is then reordered: an array in memory, or a file that ends up memory-mapped."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike


class Column:
    """Values of one column, a row at a time a scalar (``width`` None) or ``width`` of them.

    Files are written and read with plain calls: pages of a writable mapping would count as this process's memory.

    Args:
        folder: an existing folder for the file; None keeps the values in memory.
        name: of the file.
        dtype: of the values.
        width: values a row.
    """

    def __init__(self, folder: Path | None, name: str, dtype: DTypeLike, width: int | None = None) -> None:
        self.dtype = np.dtype(dtype)
        self.rows = 0
        self._folder, self._name, self._width = folder, name, width
        self._shape = () if width is None else (width,)
        self.row_bytes = self.dtype.itemsize * (1 if width is None else width)
        self._parts: list[np.ndarray] = []
        self._path = None if folder is None or width == 0 else folder / f"{name}.bin"
        self._file = None if self._path is None else self._path.open("w+b")

    def append(self, values: np.ndarray) -> None:
        """Add rows at the end."""
        values = np.ascontiguousarray(values, dtype=self.dtype)
        self.rows += len(values)
        if self._file is None:
            self._parts.append(values)
        else:
            self._file.write(values.data)

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` rows, to be written in any order."""
        self.rows = rows
        if self._file is None:
            self._parts = [np.empty((rows, *self._shape), self.dtype)]

    def read(self, low: int, high: int) -> np.ndarray:
        """Return rows ``low`` to ``high``; not to be written to."""
        if self._file is None:
            return self._array()[low:high]
        values = np.empty((high - low, *self._shape), self.dtype)
        self._file.seek(low * self.row_bytes)
        self._file.readinto(values.data.cast("B"))
        return values

    def write(self, low: int, values: np.ndarray) -> None:
        """Replace the rows from ``low`` on."""
        values = np.ascontiguousarray(values, dtype=self.dtype)
        if self._file is None:
            self._array()[low : low + len(values)] = values
        else:
            self._file.seek(low * self.row_bytes)
            self._file.write(values.data)

    def regroup(self, moves: Iterable[tuple[np.ndarray, np.ndarray]], starts: np.ndarray) -> None:
        """Move rows into blocks, keeping their order within a block.

        Args:
            moves: for each run of rows from the first on, the order that sorts it by block, and its rows in each block.
            starts: row at which each block begins.
        """
        result = Column(self._folder, f"{self._name}.regrouped", self.dtype, self._width)
        result.reserve(self.rows)
        filled = starts.astype(np.int64)
        low = 0
        for order, lengths in moves:
            values = self.read(low, low + len(order))[order]
            ends = np.cumsum(lengths)
            for block in np.flatnonzero(lengths):
                result.write(int(filled[block]), values[ends[block] - lengths[block] : ends[block]])
            filled += lengths
            low += len(order)
        self.drop()
        self._parts, self._file = result._parts, result._file
        if result._path is not None and self._path is not None:
            result._path.replace(self._path)  # the open file moves along

    def finish(self) -> np.ndarray:
        """Return all rows; mapped read-only where they lie in a file."""
        if self._file is None or self._path is None:
            return self._array()
        self._file.close()
        shape = (self.rows, *self._shape)
        return np.asarray(np.memmap(self._path, dtype=self.dtype, mode="r", shape=shape))

    def close(self) -> None:
        """Close the file, which stays where it is."""
        if self._file is not None:
            self._file.close()

    def drop(self) -> None:
        """Forget the values and delete the file."""
        self._parts = []
        self.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _array(self) -> np.ndarray:
        # An array that Arrow lent is read-only and may belong to the caller, so it is copied as well.
        if len(self._parts) != 1 or not self._parts[0].flags.writeable:
            self._parts = [np.concatenate(self._parts)]
        return self._parts[0]
