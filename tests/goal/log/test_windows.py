from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from goal.errors import ConfigurationError
from goal.log import InteractionLog, Windows, thinned

from .logs import logs, make_log


@settings(deadline=None, max_examples=30)
@given(logs, st.integers(1, 9), st.data())
def test_batch_equals_a_plain_loop(log: InteractionLog, length: int, data: st.DataObject) -> None:
    row = st.integers(0, log.events - 1)
    rows = np.array(data.draw(st.lists(row, min_size=1)), dtype=np.int64)
    windows = Windows(log, rows, length=length)
    indices = np.array(data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1)))
    history = windows.batch(indices)
    history.validate()
    assert history.window == length and len(history) == len(indices)
    for b, index in enumerate(indices):
        pending = rows[index]
        events = [r for r in range(log.events) if r <= pending and log.user_index[r] == log.user_index[pending]]
        events = events[-length:]
        n = len(events)
        assert history.lengths[b] == n
        for i, r in enumerate(events):
            np.testing.assert_array_equal(history.numeric[b, i], log.numeric[r])
            np.testing.assert_array_equal(history.categorical[b, i], log.categorical[r])
            known = i < n - 1
            assert history.incentives[b, i] == (np.float32(log.incentives[r]) if known else 0)
            np.testing.assert_array_equal(history.outcomes[b, i], log.outcomes[r] if known else np.zeros(3))
        for name in ("numeric", "categorical", "incentives", "outcomes"):
            assert (getattr(history, name)[b, n:] == 0).all()
        assert (history.outcomes[b, n - 1 :] == 0).all() and (history.incentives[b, n - 1 :] == 0).all()


@settings(deadline=None, max_examples=25)
@given(logs, st.data())
def test_successors_equal_a_plain_loop(log: InteractionLog, data: st.DataObject) -> None:
    rows = np.array(data.draw(st.lists(st.integers(0, log.events - 1), unique=True)), dtype=np.int64)
    successors = Windows(log, rows, length=3).successors()
    place = {row: i for i, row in enumerate(rows.tolist())}
    for i, row in enumerate(rows.tolist()):
        follows = row + 1 < log.events and log.user_index[row + 1] == log.user_index[row]
        assert successors.row[i] == (row + 1 if follows else -1)
        assert successors.index[i] == (place.get(row + 1, -1) if follows else -1)
    assert not successors.terminal.any()


def test_the_horizons_last_event_is_terminal() -> None:
    log = make_log(events=40, users=4)
    horizon = int(np.diff(log.offsets).max())
    log = dataclasses.replace(log, schema=dataclasses.replace(log.schema, horizon=horizon))
    terminal = Windows(log, np.arange(log.events), length=2).successors().terminal
    np.testing.assert_array_equal(terminal, log.position == horizon - 1)
    assert terminal.any()


def test_targets_are_those_of_the_pending_events() -> None:
    log = make_log()
    windows = Windows(log, np.array([4, 40, 11]), length=4)
    targets = windows.targets(torch.tensor([2, 0]))
    for name in ("incentives", "revenue", "cost", "objectives", "multiplier", "propensity"):
        np.testing.assert_array_equal(getattr(targets, name), getattr(log, name)[[11, 4]])


def test_batch_takes_tensors_and_never_aliases_the_log() -> None:
    log = make_log()
    windows = Windows(log, np.arange(log.events), length=5)
    first, second = windows.batch(torch.arange(10)), windows.batch(np.arange(10))
    torch.testing.assert_close(first.outcomes, second.outcomes)
    first.outcomes.fill_(9)
    first.numeric.fill_(9)
    torch.testing.assert_close(windows.batch(np.arange(10)).outcomes, second.outcomes)


@pytest.mark.parametrize(
    ("rows", "length", "message"),
    [
        ([0], 0, "length: 0 came"),
        ([0], 2.5, "length: 2.5 came"),
        ([60], 2, "rows: 60 to 60 came; the log has rows 0 to 59"),
        ([-1], 2, "rows: -1 to -1"),
        ([0.5], 2, "rows: an array of float64"),
        ([[1]], 2, "rows: an array of int64 with shape"),
    ],
)
def test_refuses(rows: list[float], length: float, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Windows(make_log(), np.array(rows), length=length)  # type: ignore[arg-type]


def test_parts_hold_every_window_once_in_order() -> None:
    log = make_log(130)
    for rows, count in ((np.arange(5000) % log.events, 3), (np.arange(0), 1)):
        parts = Windows(log, rows, length=2).parts()
        assert len(parts) == count and max(len(part) for part in parts) <= 2048
        assert np.array_equal(np.concatenate(parts), np.arange(len(rows)))


@pytest.mark.parametrize(("count", "most", "left"), [(7, 7, 7), (8, 7, 4), (2047, 1024, 1024), (0, 5, 0)])
def test_thinned_rows_are_even_and_no_more_than_said(count: int, most: int, left: int) -> None:
    rows = thinned(np.arange(100, 100 + count), most)
    assert len(rows) == left and len(set(np.diff(rows))) <= 1
