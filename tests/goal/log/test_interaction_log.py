from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goal.errors import LogError, SchemaError
from goal.log import InteractionLog, Objective, Schema

from .logs import ARRAYS, SCHEMA, assert_same, columns, logs, make_log

BARE = Schema(user="u", time="t", incentive="a", revenue="r")


def bare(**changes: object) -> dict[str, object]:
    return {"u": [1, 1, 2], "t": [0.0, 1.0, 0.0], "a": [1.0, 2.0, 0.0], "r": [3.0, 0.0, 1.0]} | changes


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 80), st.integers(1, 10), st.integers(0, 10_000))
def test_sorts_like_a_plain_sort(events: int, users: int, seed: int) -> None:
    given_columns = columns(np.random.default_rng(seed).integers(0, users, events), seed=seed)
    log = InteractionLog.from_columns(SCHEMA, given_columns)
    order = sorted(range(events), key=lambda i: tuple(given_columns[name][i] for name in ("user", "time", "order")))
    user_ids, counts = np.unique(given_columns["user"], return_counts=True)
    np.testing.assert_array_equal(log.user_ids, user_ids)
    np.testing.assert_array_equal(np.diff(log.offsets), counts)
    np.testing.assert_array_equal(log.user_ids[log.user_index], given_columns["user"][order])
    for field, name in {"time": "time", "incentives": "amount", "revenue": "revenue", "cost": "cost"}.items():
        np.testing.assert_array_equal(getattr(log, field), given_columns[name][order])
    np.testing.assert_array_equal(log.numeric[:, 0], given_columns["x"][order])
    np.testing.assert_array_equal(log.outcomes[:, 1], given_columns["click"][order])
    np.testing.assert_array_equal(log.multiplier, given_columns["lambda"][order].astype(np.float32))
    np.testing.assert_array_equal(log.propensity, given_columns["propensity"][order])
    for c, name in enumerate(SCHEMA.categorical):
        values = [None, *log.categories[c]]
        expected = [None if value is None else str(value) for value in given_columns[name][order].tolist()]
        assert [values[code] for code in log.categorical[:, c]] == expected
        assert list(log.categories[c]) == sorted({value for value in expected if value is not None})


@settings(deadline=None, max_examples=30)
@given(logs, st.data())
def test_the_order_of_the_rows_given_does_not_matter(log: InteractionLog, data: st.DataObject) -> None:
    users = np.random.default_rng(3).integers(0, 5, 30)
    given_columns = columns(users)
    shuffled = np.random.default_rng(data.draw(st.integers(0, 99))).permutation(30)
    assert_same(
        InteractionLog.from_columns(SCHEMA, given_columns),
        InteractionLog.from_columns(SCHEMA, {name: values[shuffled] for name, values in given_columns.items()}),
    )


@settings(deadline=None, max_examples=25)
@given(logs, st.data())
def test_select_users_takes_their_rows(log: InteractionLog, data: st.DataObject) -> None:
    users = data.draw(st.lists(st.integers(0, log.users - 1), min_size=1, unique=True))
    part = log.select_users(users)
    rows = np.concatenate([np.arange(log.offsets[u], log.offsets[u + 1]) for u in users])
    np.testing.assert_array_equal(part.user_ids, log.user_ids[users])
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(part, name), getattr(log, name)[rows])
    np.testing.assert_array_equal(part.position, log.position[rows])
    mask = np.isin(np.arange(log.users), users)
    assert_same(log.select_users(mask), log.select_users(np.sort(users)))


@pytest.mark.parametrize("users", [[], [0, 0], [99], [-1], [0.5]])
def test_select_users_refuses(users: list[float]) -> None:
    with pytest.raises(LogError, match="users: "):
        make_log().select_users(users)  # type: ignore[arg-type]


def test_locate_agrees_with_user_index_and_position() -> None:
    log = make_log()
    rows = np.array([5, 0, 59, 5])
    user, position = log.locate(rows)
    np.testing.assert_array_equal(user, log.user_index[rows])
    np.testing.assert_array_equal(position, log.position[rows])


def test_keep_categories_makes_the_others_unknown() -> None:
    log = make_log()
    rows = np.arange(20)
    kept = log.keep_categories(rows, minimum=3)
    for c in range(2):
        before = np.array(["", *log.categories[c]])[log.categorical[:, c]]
        values, counts = np.unique(before[rows], return_counts=True)
        common = [value for value in values[counts >= 3] if value]
        assert list(kept.categories[c]) == common
        after = np.array(["", *kept.categories[c]])[kept.categorical[:, c]]
        np.testing.assert_array_equal(after, np.where(np.isin(before, common), before, ""))


def test_settled_categories_are_kept() -> None:
    given_columns = columns(np.zeros(40, dtype=int))
    log = InteractionLog.from_columns(SCHEMA, given_columns, categories=[["Lyon", "Rome"], ["3"]])
    assert log.categories == (("Lyon", "Rome"), ("3",))
    order = np.lexsort([given_columns["order"], given_columns["time"]])
    np.testing.assert_array_equal(log.categorical[:, 0], given_columns["city"][order] == "Lyon")
    with pytest.raises(LogError, match="1 lists came; the schema names 2"):
        InteractionLog.from_columns(SCHEMA, given_columns, categories=[["Lyon"]])


def test_cost_follows_the_incentive_unless_named() -> None:
    np.testing.assert_array_equal(InteractionLog.from_columns(BARE, bare()).cost, [1, 2, 0])
    rated = InteractionLog.from_columns(dataclasses.replace(BARE, cost_rate=0.5), bare())
    np.testing.assert_array_equal(rated.cost, [0.5, 1, 0])
    assert rated.multiplier is None and rated.propensity is None
    assert rated.numeric.shape == (3, 0) and rated.categorical.shape == (3, 0) and rated.outcomes.shape == (3, 1)


def test_does_not_share_memory_with_what_was_given() -> None:
    given_columns = {name: np.array(values, dtype=float) for name, values in bare().items()}
    log = InteractionLog.from_columns(BARE, given_columns)
    log.revenue[:] = 7
    log.time[:] = 7
    np.testing.assert_array_equal(given_columns["r"], [3, 0, 1])
    np.testing.assert_array_equal(given_columns["t"], [0, 1, 0])


@pytest.mark.parametrize(
    ("times", "seconds"),
    [
        (np.array(["1970-01-02", "1970-01-03", "1970-01-01"], "datetime64[D]"), [86400, 172800, 0]),
        (np.array([1, 2, 3], "datetime64[ms]"), [0.001, 0.002, 0.003]),
        (np.array(["1970-01-01T00:00:01", "1970-01-01T00:00:02", "1970-01-01"], "datetime64[ns]"), [1, 2, 0]),
        (["1970-01-01T00:00:01Z", "1970-01-01T01:00:02+01:00", "1970-01-01T00:00:00Z"], [1, 2, 0]),
        (["1970-01-01 00:00:01.5", "1970-01-01 00:00:02", "1970-01-01"], [1.5, 2, 0]),
        (["10", "11.5", "1e3"], [10, 11.5, 1000]),
        (np.array([3, 4, 5], np.uint8), [3, 4, 5]),
    ],
)
def test_times_of_every_kind(times: object, seconds: list[float]) -> None:
    np.testing.assert_array_equal(InteractionLog.from_columns(BARE, bare(t=times)).time, seconds)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (["b", "b", "a"], ["a", "b"]),
        ([7.0, 7.0, 3.0], [3, 7]),
        (np.array([2**62, 2**62, 5], np.uint64), [5, 2**62]),
        (["10", "10", "9"], ["10", "9"]),
    ],
)
def test_user_ids_of_every_kind(ids: object, expected: list[object]) -> None:
    assert InteractionLog.from_columns(BARE, bare(u=ids)).user_ids.tolist() == expected


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a": [1.0, -2.5, 0.0]}, "column 'a', row 1: -2.5 came; expected a finite amount that is not negative"),
        ({"a": [1.0, 1.0, NAN]}, "column 'a', row 2: the value is missing (null or NaN)"),
        ({"r": [1, None, 3]}, "column 'r', row 1: the value is missing"),
        ({"r": [-3, 0, 0]}, "column 'r', row 0: -3 came"),
        ({"r": [0.0, INF, 0.0]}, "column 'r', row 1: inf came"),
        ({"r": ["1", "2", "two"]}, "column 'r', row 2: 'two' is not a number"),
        ({"r": np.array([1.0, "x", 2.0], dtype=object)}, "column 'r', row 1: mixed types: 'x' is a str where row 0"),
        ({"r": np.zeros(3, "datetime64[s]")}, "column 'r', row 0: has the type timestamp[s]; expected numbers"),
        ({"r": [[1.0], [2.0], [3.0]]}, "column 'r': has shape (3, 1)"),
        ({"r": [1.0, 2.0]}, "column 'r': has 2 values where 'u' has 3"),
        ({"u": ["a", "", "b"]}, "column 'u', row 1: the user is empty"),
        ({"u": ["a", " ", "b"]}, "column 'u', row 1: the user is empty"),
        ({"u": ["a", None, "b"]}, "column 'u', row 1: the user is missing (null)"),
        ({"u": [1.0, NAN, 2.0]}, "column 'u', row 1: the user is missing"),
        ({"u": [1.0, 2.5, 2.0]}, "column 'u', row 1: user 2.5 is not a whole number"),
        ({"u": [True, False, True]}, "column 'u', row 0: has the type bool"),
        ({"u": np.array([1, "b", 2], dtype=object)}, "column 'u', row 1: mixed types: 'b' is a str"),
        ({"t": [0.0, NAN, 1.0]}, "column 't', row 1: the value is missing (null or NaN); expected a time"),
        ({"t": [0.0, INF, 1.0]}, "column 't', row 1: inf came; expected a time"),
        ({"t": np.array(["1970-01-02", "NaT", "1970"], "datetime64[s]")}, "column 't', row 1: the value is missing"),
        ({"t": ["2024-01-01", "2024-13-01", "2024-01-02"]}, "column 't', row 1: '2024-13-01' cannot be read as a time"),
        ({"t": ["2024-01-01", "2024-01-01T00:00:00Z", "3"]}, "row 1: '2024-01-01T00:00:00Z' cannot be read as a time"),
        (
            {"t": [1.0, 1.0, 0.0]},
            "column 't', row 0 and row 1: user 1 has two events at 1.0; name a column that orders",
        ),
        ({"u": [], "t": [], "a": [], "r": []}, "the log has no rows"),
    ],
)
def test_bad_values_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(LogError) as caught:
        InteractionLog.from_columns(BARE, bare(**changes))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("role", "values", "message"),
    [
        ({"cost": "k"}, [0, -1, 0], "column 'k', row 1: -1 came"),
        ({"numeric": ("k",)}, [0, INF, 0], "column 'k', row 1: inf came; expected a finite number, or nothing"),
        (
            {"numeric": ("k",)},
            [0, 1e300, 0],
            "column 'k', row 1: 1e+300 came; expected a number in the range of float32",
        ),
        ({"categorical": ("k",)}, [0.0, 0.5, 1.0], "column 'k', row 1: 0.5 is not a category"),
        ({"objectives": (Objective("k"),)}, [0, 1, 2], "column 'k', row 2: 2 came; expected 0 or 1"),
        ({"objectives": (Objective("k", "amount"),)}, [0, 1, -2], "column 'k', row 2: -2 came"),
        ({"multiplier": "k"}, [0, 1, -2], "column 'k', row 2: -2 came"),
        ({"propensity": "k"}, [1, 0.5, 0], "column 'k', row 2: 0 came; expected a probability in (0, 1]"),
        ({"propensity": "k"}, [1, 1.5, 1], "column 'k', row 1: 1.5 came"),
        ({"propensity": "k"}, [1, NAN, 1], "column 'k', row 1: the value is missing"),
        ({"order": "k"}, [0, None, 1], "column 'k', row 1: the "),
        ({"order": "k"}, ["0", "x", "1"], "column 'k', row 1: 'x' is not a number"),
        (
            {"order": "k"},
            np.array([0, 2**63, 1], dtype=np.uint64),
            "column 'k', row 1: 9223372036854775808 came; expected a whole number below 2**63",
        ),
        (
            {"order": "k"},
            np.array(["2024-01-31", "2024-01-31", "9999-12-31"], dtype="datetime64[s]"),
            "column 'k', row 2: 9999-12-31 00:00:00 came; expected a time from 1678 to 2261",
        ),
        ({"horizon": 1}, [0, 0, 0], "user 1 has 2 events, and the schema ends an episode after 1"),
    ],
)
def test_bad_values_of_optional_columns_are_named(role: dict[str, object], values: object, message: str) -> None:
    with pytest.raises(LogError) as caught:
        InteractionLog.from_columns(dataclasses.replace(BARE, **role), bare(k=values))  # type: ignore[arg-type]
    assert message in str(caught.value)


@pytest.mark.parametrize("bad", [2.0, -0.1, NAN])
def test_a_clock_outside_the_episode_is_named(bad: float) -> None:
    schema = dataclasses.replace(BARE, numeric=("k",), clock="k", horizon=4)
    assert InteractionLog.from_columns(schema, bare(k=[0.0, 0.25, 1.0])).numeric[:, 0].tolist() == [0.0, 0.25, 1.0]
    with pytest.raises(LogError, match=rf"column 'k', row 2: user 2 has the clock {bad:g}; .* divide the place"):
        InteractionLog.from_columns(schema, bare(k=[0.0, 0.25, bad]))


@pytest.mark.parametrize("unit", ["D", "s", "ms", "ns"])
def test_times_may_order(unit: str) -> None:
    days = np.array(["2024-03-01", "2024-02-01", "1969-01-01"], dtype=f"datetime64[{unit}]")
    log = InteractionLog.from_columns(dataclasses.replace(BARE, order="n"), bare(u=[1, 1, 1], t=[0, 0, 0], n=days))
    assert log.incentives.tolist() == [0, 2, 1]


def test_an_order_column_breaks_ties_or_is_named() -> None:
    schema = dataclasses.replace(BARE, order="n")
    tied = bare(t=[1.0, 1.0, 0.0], n=[2**60 + 1, 2**60, 0])
    np.testing.assert_array_equal(InteractionLog.from_columns(schema, tied).incentives, [2, 1, 0])
    with pytest.raises(
        LogError, match=r"column 'n', row 0 and row 1: user 1 has two events at 1.0 with the same order 5"
    ):
        InteractionLog.from_columns(schema, bare(t=[1.0, 1.0, 0.0], n=[5, 5, 0]))


def test_an_unknown_column_is_named_with_the_closest() -> None:
    with pytest.raises(SchemaError, match=r"'r' is not in the columns given. Available: u, t, a, revenue"):
        InteractionLog.from_columns(BARE, {"u": [1], "t": [1], "a": [1], "revenue": [1]})
    with pytest.raises(SchemaError, match=r"Did you mean 'revenues'\?"):
        InteractionLog.from_columns(dataclasses.replace(BARE, revenue="revenue"), bare(revenues=[1, 2, 3]))
