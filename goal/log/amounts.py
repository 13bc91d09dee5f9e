"""Amounts of one column, read from Parquet a row group at a time, for logs that fit no memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from goal.errors import LogError
from goal.log.conversion import nearest_decimals
from goal.log.sources import find_files


def parquet_amounts(path: str | Path, column: str) -> Iterator[np.ndarray]:
    """The amounts in ``column`` of a Parquet file, or of all below a folder, one row group at a time.

    Whole numbers come as int64, float32 as float32, other floats and decimals as float64.

    Raises:
        LogError: no file, no such column, a column that is not a number, or a missing value.
    """
    for found in find_files(Path(path)):
        file = found.path
        if found.kind != "parquet":
            raise LogError(
                f"{file}: amounts are read from Parquet alone; expected a .parquet or .pq file, or a folder of them"
            )
        try:
            with pq.ParquetFile(file) as table:
                if column not in table.schema_arrow.names:
                    raise LogError(f"{file} has no column {column!r}, it has {', '.join(table.schema_arrow.names)}")
                for group in range(table.num_row_groups):
                    values = table.read_row_group(group, columns=[column]).column(0)
                    yield _to_amounts(values, f"column {column!r} in row group {group} of {file}")
        except (pa.ArrowException, OSError) as error:
            raise LogError(f"cannot read {file} as Parquet: {error}") from error


def _to_amounts(values: pa.ChunkedArray, where: str) -> np.ndarray:
    if values.null_count:
        raise LogError(f"{where} has {values.null_count} missing values: fill them with 0 or drop their rows")
    kind = values.type
    if pa.types.is_integer(kind):
        values = values.cast(pa.int64())
    elif pa.types.is_decimal(kind):
        return nearest_decimals(values.cast(pa.float64()).to_numpy(), kind.scale)
    elif pa.types.is_float16(kind):
        values = values.cast(pa.float64())
    elif not pa.types.is_floating(kind):
        raise LogError(f"{where} has type {kind}, expected numbers")
    return values.to_numpy()
