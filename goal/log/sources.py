"""Files of a log as a stream of Arrow batches that hold only the columns needed."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from goal.errors import LogError
from goal.log.conversion import Place
from goal.log.interaction_log import require_columns
from goal.log.schema import Schema

_PARQUET = (".parquet", ".pq")
_CSV = (".csv", ".tsv")
_COMPRESSED = (".gz", ".bz2", ".zst", ".lz4")
_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
_CSV_BLOCK_BYTES = 1 << 24


@dataclass(frozen=True)
class SourceFile:
    """A file of the log, with what the names of its folders say (hive partitions)."""

    path: Path
    kind: str
    label: str
    partitions: tuple[tuple[str, str | None], ...] = ()


def find_files(path: Path) -> list[SourceFile]:
    """Return the log's files in the order of their paths.

    Raises:
        LogError: the path is absent, or holds no Parquet or CSV file, or both kinds.
    """
    if path.is_file():
        kind = _kind(path)
        if kind is None:
            raise LogError(
                f"{path}: cannot tell the format from the name; expected {', '.join(_PARQUET + _CSV)} "
                f"(CSV also with {', '.join(_COMPRESSED)})"
            )
        return [SourceFile(path, kind, "")]
    if not path.is_dir():
        siblings = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.name, siblings, n=1)
        raise LogError(f"{path}: no such file or folder.{f' Did you mean {close[0]!r}?' if close else ''}")
    files = []
    for item in sorted(path.rglob("*")):
        parts = item.relative_to(path).parts
        kind = _kind(item)
        # Names with a leading dot or underscore are how writers mark what is not data.
        if kind is None or not item.is_file() or any(part.startswith((".", "_")) for part in parts):
            continue
        keys = (part.split("=", 1) for part in parts[:-1] if "=" in part)
        partitions = tuple((unquote(k), None if v == _NULL_PARTITION else unquote(v)) for k, v in keys)
        files.append(SourceFile(item, kind, "/".join(parts), partitions))
    kinds = {file.kind for file in files}
    if not files:
        raise LogError(f"{path}: the folder holds no file named {', '.join(_PARQUET + _CSV)}")
    if len(kinds) > 1:
        raise LogError(f"{path}: the folder holds Parquet and CSV files; a log has one format, so point at one of them")
    return files


def batches(files: Sequence[SourceFile], schema: Schema, rows: int) -> Iterator[tuple[dict[str, pa.Array], Place]]:
    """Yield the schema's columns of up to ``rows`` rows at a time, and where each batch begins.

    Raises:
        SchemaError: a file lacks a column.
        LogError: a file cannot be read.
    """
    for file in files:
        first = 0
        read = _parquet if file.kind == "parquet" else _csv
        try:
            for batch in read(file, schema, rows):
                columns = {name: batch.column(name) for name in batch.schema.names}
                for name, value in file.partitions:
                    if name in schema.columns and name not in columns:
                        columns[name] = _constant(value, batch.num_rows)
                yield columns, Place(first, file.label)
                first += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise LogError(f"{file.path}: cannot be read from row {first} on: {error}") from error


def _parquet(file: SourceFile, schema: Schema, rows: int) -> Iterator[pa.RecordBatch]:
    # A small buffered stream instead of whole column chunks: one huge row group must not fill the memory.
    with pq.ParquetFile(file.path, buffer_size=1 << 20, pre_buffer=False) as source:
        needed = _needed(file, schema, source.schema_arrow.names)
        yield from source.iter_batches(batch_size=rows, columns=needed, use_threads=True)


def _csv(file: SourceFile, schema: Schema, rows: int) -> Iterator[pa.RecordBatch]:
    parsing = pa_csv.ParseOptions(delimiter="\t" if ".tsv" in file.path.suffixes else ",", newlines_in_values=True)
    with pa_csv.open_csv(file.path, parse_options=parsing) as head:
        available = head.schema.names
    needed = _needed(file, schema, available)
    for name in needed:
        if available.count(name) > 1:
            raise LogError(f"{file.path}: two columns are called {name!r}; rename one")
    # Everything as text: with types guessed from a first block, a later odd value would be an error without a row.
    conversion = pa_csv.ConvertOptions(
        include_columns=needed,
        column_types=dict.fromkeys(needed, pa.string()),
        null_values=[""],
        strings_can_be_null=True,
    )
    reading = pa_csv.ReadOptions(block_size=_CSV_BLOCK_BYTES)
    with pa_csv.open_csv(file.path, read_options=reading, parse_options=parsing, convert_options=conversion) as source:
        for batch in source:
            for low in range(0, batch.num_rows, rows):
                yield batch.slice(low, rows)


def _needed(file: SourceFile, schema: Schema, available: Sequence[str]) -> list[str]:
    from_folders = [name for name, _ in file.partitions]
    require_columns(schema, [*available, *from_folders], str(file.path))
    return [name for name in schema.columns if name in available]


def _constant(value: str | None, rows: int) -> pa.Array:
    """Return a partition's value for every row; whole numbers become integers, as other readers have it."""
    if value is None:
        return pa.nulls(rows, pa.string())
    whole = value.removeprefix("-").isdecimal() and str(int(value)) == value
    return pa.repeat(pa.scalar(int(value) if whole else value), rows)


def _kind(path: Path) -> str | None:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _PARQUET:
        return "parquet"
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return "csv" if suffixes and suffixes[-1] in _CSV else None
