from __future__ import annotations

import dataclasses
import os
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from goal.errors import LogError, SchemaError
from goal.log import InteractionLog, Schema, Windows, assembly, read, write

from .logs import ARRAYS, SCHEMA, assert_same, columns, logs, make_log

BARE = Schema(user="u", time="t", incentive="a", revenue="r")


def table(events: int = 200, users: int = 9, *, seed: int = 0) -> pa.Table:
    given = columns(np.random.default_rng(seed + 1000).integers(0, users, events), seed=seed)
    return pa.table(
        {**{name: pa.array(values, from_pandas=True) for name, values in given.items()}, "unused": given["x"]}
    )


def expected(source: pa.Table) -> InteractionLog:
    return InteractionLog.from_columns(SCHEMA, {name: source[name].combine_chunks() for name in source.column_names})


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(logs, st.integers(1, 70))
def test_what_was_written_is_read_back(tmp_path: Path, log: InteractionLog, batch_rows: int) -> None:
    write(log, tmp_path / "log.parquet", batch_rows=batch_rows)
    assert_same(read(tmp_path / "log.parquet", SCHEMA, batch_rows=batch_rows), log)
    assert [path.name for path in tmp_path.iterdir()] == ["log.parquet"]


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 120), st.integers(1, 12), st.integers(1, 50), st.booleans())
def test_storage_holds_the_same_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: int, users: int, batch_rows: int, grouped: bool
) -> None:
    # Blocks of a few rows, so that a small log is moved between many of them.
    monkeypatch.setattr(assembly.LogAssembler, "_block_rows", property(lambda self: 7))
    source = table(events, users, seed=events)
    if grouped:
        source = source.sort_by([("user", "ascending")])
    pq.write_table(source, tmp_path / "log.parquet")
    log = read(tmp_path / "log.parquet", SCHEMA, storage=tmp_path / "store", batch_rows=batch_rows)
    assert_same(log, expected(source))
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["interaction_log"]
    assert not any(getattr(log, name).flags.writeable for name in ARRAYS)
    Windows(log, np.arange(events), length=4).batch(np.arange(events)).validate()


def test_a_second_reading_leaves_the_first_intact(tmp_path: Path) -> None:
    first, second = table(50), table(80, seed=1)
    pq.write_table(first, tmp_path / "first.parquet")
    pq.write_table(second, tmp_path / "second.parquet")
    one = read(tmp_path / "first.parquet", SCHEMA, storage=tmp_path / "store")
    two = read(tmp_path / "second.parquet", SCHEMA, storage=tmp_path / "store")
    assert_same(one, expected(first))
    assert_same(two, expected(second))


def test_a_second_reading_that_cannot_take_its_place_leaves_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(table(50), tmp_path / "log.parquet")
    read(tmp_path / "log.parquet", SCHEMA, storage=tmp_path / "store")
    kept = {path.name: path.read_bytes() for path in (tmp_path / "store" / "interaction_log").iterdir()}
    rename = os.replace

    def fail(source: Path, target: Path) -> None:
        if Path(source).name.startswith(".reading-"):
            raise OSError("permission denied")
        rename(source, target)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="permission denied"):
        read(tmp_path / "log.parquet", SCHEMA, storage=tmp_path / "store")
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["interaction_log"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "store" / "interaction_log").iterdir()} == kept


def test_times_that_order_may_have_different_units_in_different_files(tmp_path: Path) -> None:
    schema = dataclasses.replace(BARE, order="n")
    stamps = pa.array([5_000, 3_000, 1_000], pa.timestamp("ms"))
    (tmp_path / "log").mkdir()
    for part, unit in enumerate(("ms", "us", "ns")):
        row = {"u": [1], "t": [0], "a": [part], "r": [0], "n": stamps.slice(part, 1).cast(pa.timestamp(unit, "UTC"))}
        pq.write_table(pa.table(row), tmp_path / "log" / f"{part}.parquet")
    assert read(tmp_path / "log", schema).incentives.tolist() == [2, 1, 0]
    pq.write_table(pa.table({"u": [1], "t": [0], "a": [3], "r": [0], "n": [7]}), tmp_path / "log" / "3.parquet")
    with pytest.raises(LogError, match=r"column 'n', .*: mixed types: whole numbers came where .* holds times"):
        read(tmp_path / "log", schema)


@pytest.mark.parametrize("compression", ["", ".gz"])
@pytest.mark.parametrize("storage", [False, True])
def test_csv_holds_the_same_log(tmp_path: Path, compression: str, storage: bool) -> None:
    source = table()
    path = tmp_path / f"log.csv{compression}"
    with pa.CompressedOutputStream(path, "gzip") if compression else pa.OSFile(str(path), "wb") as file:
        pa_csv.write_csv(source, file)
    log = read(path, SCHEMA, storage=tmp_path / "store" if storage else None, batch_rows=17)
    assert_same(log, expected(source))


def test_tab_separated_values_and_missing_ones(tmp_path: Path) -> None:
    path = tmp_path / "log.tsv"
    path.write_text(
        "u\tt\ta\tr\tx\tc\n017\t2024-01-31\t1\t2\tNA\t\n017\t2024-02-01\t 1 \t2.5\t\tNA\n8\t1970-01-01\t0\t0\t1e1\tb\n"
    )
    log = read(path, dataclasses.replace(BARE, numeric=("x",), categorical=("c",)))
    assert log.user_ids.tolist() == ["017", "8"]
    assert log.time.tolist() == [1706659200.0, 1706745600.0, 0.0]
    np.testing.assert_array_equal(log.numeric[:, 0], [np.nan, np.nan, 10])
    assert log.categories == (("NA", "b"),) and log.categorical[:, 0].tolist() == [0, 1, 2]


def test_whole_numbers_as_ids_in_csv(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("u,t,a,r\n10,0,1,1\n9,0,1,1\n-3,0,1,1\n")
    assert read(path, BARE).user_ids.tolist() == [-3, 9, 10]


def test_folders_and_partitions_hold_the_same_log(tmp_path: Path) -> None:
    source = table()
    (tmp_path / "plain" / "deeper").mkdir(parents=True)
    pq.write_table(source.slice(0, 70), tmp_path / "plain" / "b.parquet")
    pq.write_table(source.slice(70), tmp_path / "plain" / "deeper" / "a.parquet", row_group_size=11)
    (tmp_path / "plain" / "_SUCCESS.csv").touch()
    assert_same(read(tmp_path / "plain", SCHEMA), expected(source))
    ds.write_dataset(
        source,
        tmp_path / "hive",
        format="parquet",
        partitioning=ds.partitioning(pa.schema([("city", pa.string()), ("plan", pa.int64())]), flavor="hive"),
    )
    assert_same(read(tmp_path / "hive", SCHEMA), expected(source))


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.timestamp("s"), [1, 2]),
        (pa.timestamp("ns", "Europe/Paris"), [10**9, 2 * 10**9]),
        (pa.date32(), [0, 1]),
        (pa.date64(), [0, 86_400_000]),
        (pa.int8(), [3, 4]),
        (pa.float32(), [0.5, 1.5]),
        (pa.string(), ["1970-01-01T00:00:01", "1970-01-02"]),
        (pa.dictionary(pa.int8(), pa.string()), ["1970-01-01", "1970-01-02"]),
    ],
)
def test_times_of_every_kind(tmp_path: Path, kind: pa.DataType, values: list[object]) -> None:
    times = pa.array(values).dictionary_encode() if pa.types.is_dictionary(kind) else pa.array(values, kind)
    pq.write_table(pa.table({"u": ["a", "a"], "t": times, "a": [0, 0], "r": [0, 0]}), tmp_path / "log.parquet")
    seconds = {"date": [0, 86400], "stri": [1, 86400], "dict": [0, 86400], "time": [1, 2]}.get(str(kind)[:4], values)
    assert read(tmp_path / "log.parquet", BARE).time.tolist() == seconds


def test_other_column_types(tmp_path: Path) -> None:
    schema = dataclasses.replace(BARE, numeric=("x",), categorical=("c",))
    source = pa.table(
        {
            "u": pa.array(["a", "b"]).dictionary_encode(),
            "t": pa.array([1, 2], pa.uint64()),
            "a": pa.array([1, 2]).cast(pa.decimal128(22, 2)),
            "r": pa.array([1, 2], pa.float16()) if hasattr(pa, "float16") else pa.array([1.0, 2.0]),
            "x": pa.nulls(2),
            "c": pa.array([True, None]),
        }
    )
    pq.write_table(source, tmp_path / "log.parquet")
    log = read(tmp_path / "log.parquet", schema)
    assert log.incentives.tolist() == [1, 2] and log.revenue.tolist() == [1, 2]
    assert np.isnan(log.numeric).all()
    assert log.categories == (("true",),) and log.categorical[:, 0].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("u,t,a,r\n1,0,1,1\n1,1,-1,1\n", "column 'a', row 1: -1 came"),
        ("u,t,a,r\n1,0,1,1\n1,1,,1\n", "column 'a', row 1: the value is missing"),
        ("u,t,a,r\n1,0,1,1\n1,1,1,lots\n", "column 'r', row 1: 'lots' is not a number"),
        ("u,t,a,r\n1,0,1,1\n1,soon,1,1\n", "column 't', row 1: 'soon' cannot be read as a time"),
        ("u,t,a,r\n1,0,1,1\n,1,1,1\n", "column 'u', row 1: the user is missing"),
        ("u,t,a,r\n1,0,1,1\n1,1,1\n", "cannot be read from row 0 on: CSV parse error"),
        ("u,t,a,r,a\n1,0,1,1,1\n", "two columns are called 'a'"),
        ("u,t,a,r\n", "the log has no rows"),
        ("", "Empty CSV file"),
        ("u,t,a,r\n1,0,1,1\n1,0,1,1\n", "column 't', row 0 and row 1: user 1 has two events at 0.0"),
    ],
)
@pytest.mark.parametrize("storage", [False, True])
def test_bad_csv_is_named_and_leaves_nothing(tmp_path: Path, text: str, message: str, storage: bool) -> None:
    path = tmp_path / "log.csv"
    path.write_text(text)
    with pytest.raises(LogError) as caught:
        read(path, BARE, storage=tmp_path / "store" if storage else None)
    assert message in str(caught.value)
    assert not storage or not list((tmp_path / "store").iterdir())


def test_a_failed_reading_leaves_the_earlier_one(tmp_path: Path) -> None:
    source = table()
    pq.write_table(source, tmp_path / "log.parquet")
    log = read(tmp_path / "log.parquet", SCHEMA, storage=tmp_path / "store")
    bad = source.set_column(source.column_names.index("revenue"), "revenue", pa.array([-1.0] * len(source)))
    pq.write_table(bad, tmp_path / "bad.parquet")
    with pytest.raises(LogError, match="-1 came"):
        read(tmp_path / "bad.parquet", SCHEMA, storage=tmp_path / "store")
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["interaction_log"]
    assert_same(log, expected(source))


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"u": ["x"]}, "column 'u', row 0 of b.parquet: mixed types: text came where row 0 of a.parquet holds integer"),
        ({"t": pa.array([5], pa.timestamp("s"))}, "column 't', row 0 of b.parquet: mixed types: timestamp came where"),
        ({"r": ["x"]}, "column 'r', row 0 of b.parquet: 'x' is not a number"),
        ({"a": [[1]]}, "column 'a', row 0 of b.parquet: has the type list<"),
        ({"t": [0]}, "row 0 of a.parquet and row 0 of b.parquet: user 1 has two events at 0.0"),
    ],
)
def test_files_that_disagree_are_named(tmp_path: Path, second: dict[str, object], message: str) -> None:
    row: dict[str, object] = {"u": [1], "t": [0], "a": [1], "r": [1]}
    pq.write_table(pa.table(row), tmp_path / "a.parquet")
    pq.write_table(pa.table(row | {"t": [1]} | second), tmp_path / "b.parquet")
    with pytest.raises(LogError) as caught:
        read(tmp_path, BARE)
    assert message in str(caught.value)


def test_rows_are_counted_across_batches(tmp_path: Path) -> None:
    rows = 100
    source = {
        "u": np.arange(rows),
        "t": np.zeros(rows),
        "a": np.zeros(rows),
        "r": np.where(np.arange(rows) == 71, -4, 0),
    }
    pq.write_table(pa.table(source), tmp_path / "log.parquet", row_group_size=30)
    with pytest.raises(LogError, match="column 'r', row 71: -4 came"):
        read(tmp_path / "log.parquet", BARE, batch_rows=8)


def test_unknown_columns_and_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    pq.write_table(pa.table({"u": [1], "t": [0], "a": [1], "revenue": [1]}), path)
    with pytest.raises(
        SchemaError, match=r"'revenues' is not in .*log.parquet. Did you mean 'revenue'\? Available: u, t"
    ):
        read(path, dataclasses.replace(BARE, revenue="revenues"))
    with pytest.raises(LogError, match=r"log.parqet: no such file or folder. Did you mean 'log.parquet'\?"):
        read(tmp_path / "log.parqet", BARE)
    (tmp_path / "log.txt").touch()
    with pytest.raises(LogError, match="cannot tell the format"):
        read(tmp_path / "log.txt", BARE)
    (tmp_path / "empty").mkdir()
    with pytest.raises(LogError, match="the folder holds no file named"):
        read(tmp_path / "empty", BARE)
    (tmp_path / "log.csv").touch()
    with pytest.raises(LogError, match="holds Parquet and CSV files"):
        read(tmp_path, BARE)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 nothing of use PAR1")
    with pytest.raises(LogError, match=r"broken.parquet: cannot be read from row 0 on"):
        read(tmp_path / "broken.parquet", BARE)
    with pytest.raises(LogError, match="batch_rows: 0 came"):
        read(path, BARE, batch_rows=0)


def test_write_replaces_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "log.parquet"
    write(make_log(), path)
    before = path.read_bytes()

    def fail(*arguments: object, **named: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", fail)
    with pytest.raises(OSError, match="disk full"):
        write(make_log(seed=1), path)
    assert path.read_bytes() == before and len(list(path.parent.iterdir())) == 1
    with pytest.raises(LogError, match="is a folder"):
        write(make_log(), tmp_path)


def test_complete_journey(shared_data: Path) -> None:
    path = shared_data / "complete_journey_baskets.parquet"
    schema = Schema.load(Path(__file__).parents[3] / "examples" / "complete_journey.toml")
    log = read(path, schema)
    assert (log.events, log.users) == (155_848, 2_469)
    assert log.revenue.sum() / log.cost.sum() == pytest.approx(5.77, abs=0.005)
    assert np.isnan(log.numeric[:, 0]).sum() == 2_469  # the first trip of each household has no gap
    np.testing.assert_array_equal(log.numeric[:, schema.numeric.index("step")], log.position)
    ties = (np.diff(log.time) == 0) & (np.diff(log.user_index) == 0)
    assert ties.sum() == 84
    unordered = dataclasses.replace(schema, order=None)
    with pytest.raises(
        LogError, match=r"column 'ts', row 556 and row 557: user 14 has two events at .*2017-01-13T03:05:51"
    ):
        read(path, unordered)


@settings(deadline=None)
@given(st.lists(st.integers(0, 9_999_999), min_size=1, max_size=20), st.integers(0, 4))
def test_amounts_stored_as_float32_or_decimals_are_those_that_were_written(units: list[int], decimals: int) -> None:
    amounts = np.array([float(f"{unit}e-{decimals}") for unit in units])
    stored = [
        pa.array(amounts.astype(np.float32)),
        pa.array([Decimal(f"{unit}e-{decimals}") for unit in units], pa.decimal128(12, decimals)),
    ]
    for incentives in stored:
        given = {"u": np.zeros(len(units), int), "t": np.arange(len(units)), "r": np.ones(len(units))}
        log = InteractionLog.from_columns(BARE, {**given, "a": incentives})
        assert log.incentives.tolist() == amounts.tolist()
