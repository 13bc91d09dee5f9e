"""Reading a log from Parquet or CSV in batches, and writing it as Parquet."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from goal.errors import LogError
from goal.log.assembly import LogAssembler
from goal.log.interaction_log import InteractionLog
from goal.log.schema import Schema
from goal.log.sources import SourceFile, batches, find_files

_ARRAYS = "interaction_log"


def read(
    path: str | Path,
    schema: Schema,
    *,
    storage: str | Path | None = None,
    batch_rows: int = 1 << 18,
    categories: Sequence[Sequence[str]] | None = None,
) -> InteractionLog:
    """Read, check and sort a log; only the columns that the schema names are read.

    Args:
        path: a Parquet or CSV file (``.csv``, ``.tsv``, also compressed), or a folder of such files of one kind,
            searched in depth; folders named ``column=value`` give that column its value (hive partitions).
        schema: roles of the columns.
        storage: folder for the arrays, which are then memory-mapped, so that a log larger than memory is never loaded
            whole. The arrays lie in ``storage/interaction_log``, replacing those of an earlier reading; while
            reading, the folder needs a little more space than the columns.
        batch_rows: rows in memory at a time.
        categories: values of each categorical column where they are settled already, such as a trained policy's; other
            values then count as unknown.

    Raises:
        SchemaError: the schema names a column that a file does not have; the message lists those it has.
        LogError: a value breaks a rule (the message names column, row and value), or a file cannot be read. Nothing
            half-written is left.
    """
    if batch_rows < 1:
        raise LogError(f"batch_rows: {batch_rows} came; expected at least 1")
    files = find_files(Path(path))
    if storage is None:
        return _assemble(files, schema, None, batch_rows, categories)
    storage = Path(storage)
    storage.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".reading-", dir=storage))
    try:
        log = _assemble(files, schema, folder, batch_rows, categories)
        # Mapped files survive a rename, so readers of an earlier log in this place are undisturbed as well.
        _replace(storage / _ARRAYS, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return log


def write(log: InteractionLog, path: str | Path, *, batch_rows: int = 1 << 18) -> None:
    """Write a log as one Parquet file under the schema's column names; ``read`` gives the same log back.

    Times are written as the numbers they are in ``log.time``. The file appears whole or not at all.

    Args:
        log: the log.
        path: the file, whose folder is made where it is missing; an existing file is replaced.
        batch_rows: rows in memory at a time, and in a row group.

    Raises:
        LogError: ``path`` is a folder.
    """
    path = Path(path)
    if path.is_dir():
        raise LogError(f"{path}: is a folder; expected the name of a file, such as {path / 'log.parquet'}")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        writer = None
        for low in range(0, log.events, batch_rows):
            table = _table(log, low, min(low + batch_rows, log.events))
            writer = writer or pq.ParquetWriter(partial, table.schema)
            writer.write_table(table)
        if writer is None:
            raise LogError("the log has no rows; there is nothing to write")
        writer.close()
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _table(log: InteractionLog, low: int, high: int) -> pa.Table:
    schema = log.schema
    user, position = log.locate(np.arange(low, high))
    columns: dict[str, np.ndarray | pa.Array] = {
        schema.user: pa.array(log.user_ids[user]),
        schema.time: log.time[low:high],
        schema.incentive: log.incentives[low:high],
        schema.revenue: log.revenue[low:high],
    }
    if schema.cost is not None:
        columns[schema.cost] = log.cost[low:high]
    for name, values in ((schema.multiplier, log.multiplier), (schema.propensity, log.propensity)):
        if name is not None and values is not None:
            columns[name] = values[low:high]
    for i, name in enumerate(schema.numeric):
        columns[name] = log.numeric[low:high, i]
    for i, name in enumerate(schema.categorical):
        values = pa.array([None, *log.categories[i]], pa.string())
        columns[name] = values.take(pa.array(log.categorical[low:high, i]))
    for i, objective in enumerate(schema.objectives):
        columns[objective.name] = log.objectives[low:high, i]
    if schema.order is not None and schema.order not in columns:
        columns[schema.order] = position  # rows are in order, so the position says it
    return pa.table({name: columns[name] for name in schema.columns})


def _replace(target: Path, folder: Path) -> None:
    """Put ``folder`` in the place of ``target``, which may exist and stays where that fails."""
    earlier = Path(tempfile.mkdtemp(prefix=".replaced-", dir=target.parent))
    aside = earlier / target.name
    try:
        if target.exists():
            os.replace(target, aside)
        try:
            os.replace(folder, target)
        except BaseException:
            if aside.exists():
                os.replace(aside, target)
            raise
    finally:
        shutil.rmtree(earlier, ignore_errors=True)


def _assemble(
    files: Sequence[SourceFile],
    schema: Schema,
    folder: Path | None,
    batch_rows: int,
    categories: Sequence[Sequence[str]] | None,
) -> InteractionLog:
    assembler = LogAssembler(schema, folder=folder, categories=categories, typeless=files[0].kind == "csv")
    try:
        for columns, place in batches(files, schema, batch_rows):
            assembler.append(columns, place)
        return InteractionLog(**assembler.finish())
    finally:
        assembler.close()
