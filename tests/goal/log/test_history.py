from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from goal.errors import LogError
from goal.log import History, Windows

from .logs import make_log


def history() -> History:
    """Return three windows of 4, whose lengths are 1, 2 and 4."""
    log = make_log()
    longest = np.argmax(np.diff(log.offsets))
    rows = log.offsets[longest] + np.array([0, 1, 5])
    return Windows(log, rows, length=4).batch(np.arange(3))


def test_select_repeat_and_move() -> None:
    batch = history()
    assert len(batch) == 3 and batch.window == 4 and batch.device == torch.device("cpu")
    twice = batch.repeat_interleave(2)
    assert twice.lengths.tolist() == [1, 1, 2, 2, 4, 4]
    torch.testing.assert_close(twice.select(torch.tensor([0, 2, 4])).outcomes, batch.outcomes)
    torch.testing.assert_close(twice.select(slice(4, None)).incentives[0], batch.incentives[2])
    assert batch.select(torch.tensor([True, False, True])).lengths.tolist() == [1, 4]
    assert batch.to("meta").numeric.device.type == "meta"
    batch.validate()
    batch.select(slice(0, 0)).validate()


@pytest.mark.parametrize("events", [1, 2, 3, 4, 9])
def test_last_events_are_those_of_a_shorter_window(events: int) -> None:
    log = make_log()
    longest = np.argmax(np.diff(log.offsets))
    rows = log.offsets[longest] + np.array([0, 1, 5])
    cut, expected = (Windows(log, rows, length=length).batch(np.arange(3)) for length in (4, min(events, 4)))
    cut = cut.last(events)
    cut.validate()
    for field in dataclasses.fields(History):
        pair = getattr(cut, field.name), getattr(expected, field.name)
        torch.testing.assert_close(*pair, rtol=0, atol=0, equal_nan=True)


def test_missing_features_are_legal() -> None:
    batch = history()
    batch.numeric[2, 1, 0] = torch.nan
    batch.validate()


@pytest.mark.parametrize(
    ("field", "place", "value", "message"),
    [
        ("numeric", (0, 1, 0), 2.0, "history.numeric: window 0, event 1 holds [2.0, 0.0]; expected 0 in the padding"),
        ("numeric", (0, 1, 0), float("nan"), "history.numeric: window 0, event 1"),
        ("numeric", (2, 3, 1), float("inf"), "history.numeric: window 2, event 3"),
        ("categorical", (1, 2, 1), 1, "history.categorical: window 1, event 2"),
        ("categorical", (1, 0, 1), -1, "expected codes from 0 on"),
        (
            "incentives",
            (1, 1),
            3.0,
            "history.incentives: window 1, event 1 holds 3.0; expected 0 for the pending event",
        ),
        ("incentives", (2, 0), -3.0, "history.incentives: window 2, event 0 holds -3.0; expected finite amounts"),
        ("outcomes", (2, 3, 0), 1.0, "history.outcomes: window 2, event 3"),
        ("outcomes", (2, 2, 0), float("nan"), "expected finite outcomes"),
        ("lengths", (1,), 0, "history.lengths: window 1 has 0; expected 1 to 4"),
        ("lengths", (2,), 5, "history.lengths: window 2 has 5; expected 1 to 4"),
    ],
)
def test_validate_names_the_value(field: str, place: tuple[int, ...], value: float, message: str) -> None:
    batch = history()
    getattr(batch, field)[place] = value
    with pytest.raises(LogError) as caught:
        batch.validate()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("field", "tensor", "message"),
    [
        ("numeric", torch.zeros(3, 4), "history.numeric: shape (3, 4) and torch.float32 came; expected 3 dimensions"),
        ("numeric", torch.zeros(3, 4, 2, dtype=torch.float64), "torch.float64 came"),
        ("numeric", torch.zeros(3, 5, 2), "does not begin with (3, 4)"),
        ("numeric", torch.zeros(3, 4, 2, device="meta"), "history.numeric: is on meta"),
        ("categorical", torch.zeros(3, 4, 2), "expected 3 dimensions (B, L, C) and torch.int64"),
        ("incentives", torch.zeros(3, 0), "a window needs at least one event"),
        ("outcomes", torch.zeros(3, 4, 0), "the first must be the revenue"),
        ("lengths", torch.ones(2, dtype=torch.int64), "history.lengths: 2 values came for 3 windows"),
        ("lengths", np.ones(3), "history.lengths: a ndarray came; expected a torch.Tensor"),
    ],
)
def test_validate_names_the_shape(field: str, tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(LogError) as caught:
        dataclasses.replace(history(), **{field: tensor}).validate()
    assert message in str(caught.value)
