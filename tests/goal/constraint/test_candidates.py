"""Candidate multipliers and Proposition 1."""

from __future__ import annotations

import numpy as np
import pytest

from goal.constraint import candidates, threshold, without_rises
from goal.errors import ConfigurationError


def test_candidates_of_the_paper():
    assert candidates(3.0, step=0.5) == (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0)


@pytest.mark.parametrize("step", [0.1, 0.3, 0.7, 1 / 3, 5.0])
@pytest.mark.parametrize("threshold_value", [None, 0.0, 1.0, 4.1])
def test_candidates_ascend_by_the_step_and_end_at_the_top(step: float, threshold_value: float | None):
    made = candidates(3.0, step=step, threshold=threshold_value)
    top = max(3.0, threshold_value or 0.0)
    gaps = np.diff(made)
    assert made[0] == 0.0
    assert made[-1] == top
    assert np.allclose(gaps[:-1], step)
    assert 1e-6 < gaps[-1] <= step + 1e-9


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        ({"roi_target": 0.0, "step": 0.5}, "roi_target"),
        ({"roi_target": float("nan"), "step": 0.5}, "roi_target"),
        ({"roi_target": 3.0, "step": -1.0}, "step"),
        ({"roi_target": 3.0, "step": 1e-9}, "step"),
        ({"roi_target": 3.0, "step": 0.5, "threshold": -1.0}, "threshold"),
        ({"roi_target": 3.0, "step": 0.5, "threshold": float("inf")}, "threshold"),
    ],
)
def test_candidates_name_the_culprit(arguments: dict, culprit: str):
    with pytest.raises(ConfigurationError, match=f"^{culprit} is"):
        candidates(arguments.pop("roi_target"), **arguments)


def test_threshold_is_where_the_cheapest_amount_becomes_best():
    generator = np.random.default_rng(0)
    revenue = generator.gamma(2.0, 3.0, size=(50, 6))
    cost = np.cumsum(generator.uniform(0.1, 2.0, size=(50, 6)), axis=1)
    bar = threshold(revenue, cost)
    for multiplier in np.linspace(0, 2 * bar, 400):
        cheapest_everywhere = bool(((revenue - multiplier * cost).argmax(axis=1) == 0).all())
        if abs(multiplier - bar) > 1e-9:
            assert cheapest_everywhere == (multiplier > bar)


def test_threshold_is_zero_where_paying_never_gains():
    assert threshold([3.0, 2.0, 1.0], [0.0, 1.0, 2.0]) == 0.0


def test_threshold_quantile_leaves_out_the_worst_states():
    revenue = np.array([[0.0, state] for state in range(1, 101)], dtype=float)
    assert threshold(revenue, [0.0, 1.0]) == 100.0
    assert threshold(revenue, [0.0, 1.0], quantile=0.95) == 95.0


@pytest.mark.parametrize(
    ("revenue", "cost", "message"),
    [
        ([1.0, 2.0], [0.0, 1.0, 2.0], "shape"),
        ([1.0], [0.0], "at least one state"),
        ([1.0, 2.0], [1.0, 1.0], "ascend"),
        ([1.0, float("nan")], [0.0, 1.0], "NaN"),
        (np.zeros((2, 3, 4)), np.arange(4.0), "shape"),
        (np.zeros((3, 2)), np.array([[0.0, 1.0]] * 2), "same number of states"),
    ],
)
def test_threshold_rejects(revenue, cost, message: str):
    with pytest.raises(ConfigurationError, match=message):
        threshold(revenue, cost)


def test_threshold_rejects_a_quantile_of_zero():
    with pytest.raises(ConfigurationError, match="quantile"):
        threshold([1.0, 2.0], [0.0, 1.0], quantile=0.0)


def test_cost_never_rises_with_what_is_asked_for():
    generator = np.random.default_rng(0)
    multipliers = np.linspace(0, 3, 61)
    for _ in range(50):
        cost = np.sort(generator.gamma(2.0, size=61))[::-1] + 0.1 * generator.normal(size=61)
        served = without_rises(multipliers, cost)
        place = np.searchsorted(multipliers, served)
        assert (np.diff(cost[place]) <= 0).all() and (np.diff(place) >= 0).all() and (served <= multipliers).all()
        assert (cost[place] == np.minimum.accumulate(cost)).all()
    falling = np.linspace(9, 1, 61)
    assert (without_rises(multipliers, falling) == multipliers).all(), "what never rises is left as it is"


@pytest.mark.parametrize(
    ("multipliers", "cost", "message"),
    [
        ([0.0, 1.0], [1.0], "one cost for each"),
        ([1.0, 0.0], [2.0, 1.0], "ascend; sort both"),
        ([0.0, 1.0], [np.nan, 1.0], "finite"),
    ],
)
def test_costs_that_do_not_fit_are_named(multipliers, cost, message: str):
    with pytest.raises(ConfigurationError, match=message):
        without_rises(multipliers, cost)
