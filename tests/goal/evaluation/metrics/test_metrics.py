"""The measures against naive loops."""

from __future__ import annotations

import doctest
import importlib
import math
import pkgutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goal.errors import ConfigurationError
from goal.evaluation import metrics
from goal.evaluation.metrics import incremental_roi, regret, rev, roi, roi_violation_rate, share_of_gain, window_roi


def naive_violation_rate(revenue, cost, target, window, stride) -> float:
    violated, windows, start = 0, 0, 0
    while start + window <= len(revenue):
        earned = math.fsum(revenue[start : start + window])
        paid = math.fsum(cost[start : start + window])
        if paid > 0 and earned < target * paid:
            violated += 1
        windows += 1
        start += stride
    return violated / windows


@pytest.mark.parametrize("module", [module.name for module in pkgutil.iter_modules(metrics.__path__)])
def test_the_examples_in_the_docstrings(module: str):
    loaded = importlib.import_module(f"goal.evaluation.metrics.{module}")
    results = doctest.testmod(loaded)
    assert results.failed == 0
    assert module.startswith("_") or results.attempted > 0


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=60),
    st.integers(1, 20),
    st.integers(1, 9),
    st.integers(1, 5),
)
def test_violation_rate_of_whole_numbers_is_exact(stream, window: int, stride: int, target: int):
    # Whole numbers tie often, and their sums are exact in the naive loop.
    revenue, cost = np.array(stream, dtype=float).T
    if len(revenue) < window:
        with pytest.raises(ConfigurationError, match="window"):
            roi_violation_rate(revenue, cost, target=target, window=window, stride=stride)
        return
    expected = naive_violation_rate(revenue, cost, target, window, stride)
    assert roi_violation_rate(revenue, cost, target=target, window=window, stride=stride) == expected


@pytest.mark.parametrize("window", [4, 17, 1000])
def test_violation_rate_of_money(window: int):
    generator = np.random.default_rng(window)
    revenue = generator.lognormal(size=20_000) * 30 * (generator.random(20_000) < 0.1)
    cost = generator.choice([0.0, 0.1, 0.7, 3.3], size=20_000, p=[0.7, 0.1, 0.1, 0.1])
    expected = naive_violation_rate(revenue, cost, 12.0, window, max(window // 4, 1))
    assert 0 < expected < 1
    assert roi_violation_rate(revenue, cost, target=12.0, window=window) == expected


def test_windows_that_just_meet_the_target_are_no_violations():
    # 0.1 and 0.3 are not exact in binary: a running sum misses the tie by rounding.
    cost = np.full(10_000, 0.1)
    assert roi_violation_rate(cost * 3, cost, target=3.0, window=7, stride=1) == 0.0
    assert roi_violation_rate(cost * 3 * (1 - 1e-6), cost, target=3.0, window=7, stride=1) == 1.0


def test_windows_without_cost_are_satisfied_even_after_costs():
    cost = np.concatenate([np.full(1000, 0.1), np.zeros(1000)])
    assert roi_violation_rate(np.zeros(2000), cost, target=3.0, window=100, stride=100) == 0.5
    assert roi_violation_rate(np.zeros(50), np.zeros(50), target=3.0, window=10) == 0.0


def test_window_roi_of_each_window():
    generator = np.random.default_rng(0)
    revenue, cost = generator.random(500), generator.random(500) * (generator.random(500) < 0.2)
    expected = [
        revenue[s : s + 8].sum() / cost[s : s + 8].sum() if cost[s : s + 8].any() else math.inf
        for s in range(0, 493, 2)
    ]
    assert window_roi(revenue, cost, window=8) == pytest.approx(np.array(expected))


def test_the_stride_is_a_quarter_window_by_default():
    generator = np.random.default_rng(0)
    revenue, cost = generator.random(999), generator.random(999)
    for window in (1, 3, 4, 50):
        stride = max(window // 4, 1)
        assert len(window_roi(revenue, cost, window=window)) == (999 - window) // stride + 1


def test_averages_against_loops():
    generator = np.random.default_rng(0)
    revenue, cost, baseline = generator.random((7, 5)), generator.random((7, 5)), generator.random(11)
    assert rev(revenue) == pytest.approx(sum(revenue.ravel()) / 35)
    assert roi(revenue, cost) == pytest.approx(sum(revenue.ravel()) / sum(cost.ravel()))
    gain = sum(revenue.ravel()) / 35 - sum(baseline) / 11
    assert incremental_roi(revenue, cost, baseline=baseline) == pytest.approx(gain / (sum(cost.ravel()) / 35))


def test_paying_nothing():
    assert roi([1.0, 0.0], [0.0, 0.0]) == math.inf
    assert roi([0.0], [0.0]) == math.inf
    assert math.isnan(incremental_roi([1.0], [0.0], baseline=[1.0]))


def test_share_of_gain_at_its_fixed_points():
    assert share_of_gain(5.0, oracle=5.0, reference=2.0) == 1.0
    assert share_of_gain(2.0, oracle=5.0, reference=2.0) == 0.0
    assert share_of_gain(0.5, oracle=5.0, reference=2.0) == -0.5
    assert math.isnan(share_of_gain(2.0, oracle=2.0, reference=2.0))
    assert regret(0.5, oracle=5.0) == 4.5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rev([]), "revenue is empty"),
        (lambda: rev([float("nan")]), "revenue holds NaN"),
        (lambda: roi([1.0], [1.0, 2.0]), "cost"),
        (lambda: roi([1.0], [-1.0]), "cost holds -1.0"),
        (lambda: incremental_roi([1.0], [1.0], baseline=[]), "baseline is empty"),
        (lambda: roi_violation_rate([1.0], [1.0], target=0.0, window=1), "target"),
        (lambda: roi_violation_rate([1.0], [1.0], target=3.0, window=0), "window is 0"),
        (lambda: roi_violation_rate([1.0], [1.0], target=3.0, window=1, stride=0), "stride is 0"),
        (lambda: roi_violation_rate([1.0], [1.0], target=3.0, window=2), "window is 2"),
        (lambda: roi_violation_rate([[1.0]], [[1.0]], target=3.0, window=1), "one stream"),
        (lambda: share_of_gain(float("nan"), oracle=1.0, reference=0.0), "value"),
        (lambda: regret(1.0, oracle=float("inf")), "oracle"),
    ],
)
def test_bad_input_is_named(call, message: str):
    with pytest.raises(ConfigurationError, match=message):
        call()
