from __future__ import annotations

import dataclasses
import datetime as dt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goal.errors import ConfigurationError
from goal.log import InteractionLog, Windows, split_by_time, split_by_user

from .logs import logs, make_log


def parts(splits: object) -> list[np.ndarray]:
    return [splits.training, splits.calibration, splits.test]  # type: ignore[attr-defined]


@settings(deadline=None, max_examples=30)
@given(logs, st.sampled_from([(0.7, 0.15, 0.15), (0.5, 0.5, 0.0), (0.8, 0.0, 0.2), (1.0, 0.0, 0.0)]))
def test_by_time_never_leaks(log: InteractionLog, fractions: tuple[float, float, float]) -> None:
    try:
        splits = split_by_time(log, fractions=fractions)
    except ConfigurationError:
        return  # too few times for the parts asked for
    training, calibration, test = parts(splits)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts(splits))), np.arange(log.events))
    for earlier, later in ((training, calibration), (calibration, test), (training, test)):
        if len(earlier) and len(later):
            assert log.time[earlier].max() < log.time[later].min()
    # No window of a training row holds an event of a later part.
    windows = Windows(log, training, length=log.events)
    _, position = log.locate(training)
    first = training - position
    for row, begin in zip(training, first, strict=True):
        assert np.isin(np.arange(begin, row + 1), training).all()
    assert (windows.successors().index < len(training)).all()


def test_shares_follow_the_fractions() -> None:
    log = make_log(1000, 10)
    log = dataclasses.replace(log, time=np.random.default_rng(0).permutation(1000).astype(float))
    assert [len(part) for part in parts(split_by_time(log))] == [700, 150, 150]
    assert [len(part) for part in parts(split_by_time(log, fractions=(0.1, 0.3, 0.6)))] == [100, 300, 600]


@pytest.mark.parametrize(
    "boundaries",
    [
        (86400, 172800.0),
        ("1970-01-02", "1970-01-03T00:00:00+00:00"),
        (dt.date(1970, 1, 2), dt.datetime(1970, 1, 3, 1, tzinfo=dt.timezone(dt.timedelta(hours=1)))),
        (np.datetime64("1970-01-02"), np.datetime64("1970-01-03T00:00:00")),
    ],
)
def test_boundaries_of_every_kind(boundaries: tuple[object, object]) -> None:
    log = make_log(30, 3)
    log = dataclasses.replace(log, time=np.repeat([0.0, 86400.0, 172800.0], 10))
    splits = split_by_time(log, boundaries=boundaries)  # type: ignore[arg-type]
    assert [part.tolist() for part in parts(splits)] == [[*range(10)], [*range(10, 20)], [*range(20, 30)]]
    assert repr(splits) == "Splits(training=10, calibration=10, test=10)"


def test_equal_boundaries_leave_calibration_empty() -> None:
    log = make_log(30, 3)
    splits = split_by_time(log, boundaries=(5, 5))
    assert len(splits.calibration) == 0
    assert log.time[splits.training].max() < 5 <= log.time[splits.test].min()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fractions": (0.5, 0.5)}, "expected three shares"),
        ({"fractions": (0.5, 0.6, 0.1)}, "sum to 1"),
        ({"fractions": (1.5, -0.5, 0)}, "not negative"),
        ({"boundaries": (5, 2)}, "calibration must begin before the test"),
        ({"boundaries": (5,)}, "expected the first times"),
        ({"boundaries": ("soon", 2)}, "'soon' cannot be read as a time"),
        ({"boundaries": (None, 2)}, "None came"),
        ({"boundaries": (1e9, 2e9)}, "calibration would hold no event"),
    ],
)
def test_by_time_refuses(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        split_by_time(make_log(), **arguments)  # type: ignore[arg-type]


@settings(deadline=None, max_examples=25)
@given(logs, st.integers(0, 9))
def test_by_user_keeps_users_whole(log: InteractionLog, seed: int) -> None:
    try:
        splits = split_by_user(log, (0.5, 0.25, 0.25), seed)
    except ConfigurationError:
        return  # too few users for three parts
    np.testing.assert_array_equal(np.sort(np.concatenate(parts(splits))), np.arange(log.events))
    users = [set(log.user_index[part].tolist()) for part in parts(splits)]
    assert sum(map(len, users)) == log.users
    again = split_by_user(log, (0.5, 0.25, 0.25), seed)
    for first, second in zip(parts(splits), parts(again), strict=True):
        np.testing.assert_array_equal(first, second)


def test_by_user_refuses_what_leaves_a_part_empty() -> None:
    with pytest.raises(ConfigurationError, match=r"the log has 1 users, and training would hold no event"):
        split_by_user(make_log(10, 1), (0.2, 0.2, 0.6))
