"""Calibration on synthetic traffic whose true curve is known.

A user with response w under multiplier x costs w * (4 - x)+ and brings 6 * w * sqrt(4 - x)+ in expectation, so the
true ROI is 6 / sqrt(4 - x), which rises with x and reaches 4 at x = 1.75.
"""

from __future__ import annotations

import doctest
import importlib
import json
import math

import numpy as np
import pytest
from scipy.optimize import isotonic_regression

from goal.constraint import calibrate, candidates
from goal.constraint.bounds import pool_increasing, ratio_bounds
from goal.errors import ConfigurationError

CANDIDATES = candidates(4.0, step=0.5)
TRUE_MULTIPLIER = 1.75


def draw(multiplier: float, users: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    spend = max(4.0 - multiplier, 0.0)
    size = generator.gamma(2.0, 0.5, size=users)
    engagements = generator.poisson(6.0 * math.sqrt(spend) * size)
    return engagements.astype(float), spend * size


class Traffic:
    """Evaluates with the same randomness for every multiplier and counts its calls."""

    def __init__(self, users: int, seed: int):
        self.users, self.seed, self.calls = users, seed, []

    def __call__(self, multiplier: float):
        self.calls.append(multiplier)
        return draw(multiplier, self.users, np.random.default_rng(self.seed))


def noiseless(multiplier: float):
    cost = np.full(10, max(4.0 - multiplier, 0.0))
    return 6.0 * np.sqrt(cost), cost


@pytest.mark.parametrize("target", [3.0, 3.3, 4.0, 5.9, 6.0, 8.4, 100.0])
def test_binary_search_agrees_with_looking_at_every_candidate(target: float):
    calibration = calibrate(noiseless, CANDIDATES, roi_target=target)
    meeting = [x for x in CANDIDATES if x == 4.0 or 6 / math.sqrt(4 - x) >= target]
    assert calibration.feasible
    assert calibration.multiplier == meeting[0]


def test_each_multiplier_is_evaluated_once_and_only_where_needed():
    traffic = Traffic(20_000, 0)
    calibration = calibrate(traffic, np.linspace(0, 3.5, 64), roi_target=4.0)
    assert len(traffic.calls) == len(set(traffic.calls)) <= 8
    assert sorted(traffic.calls) == [evaluation.multiplier for evaluation in calibration.evaluations]


def test_infeasible_defaults_to_the_safest_and_says_so():
    calibration = calibrate(Traffic(1000, 0), (0.0, 1.0, 2.0), roi_target=50.0)
    assert not calibration.feasible
    assert calibration.multiplier == 2.0
    assert "No multiplier meets" in calibration.message
    assert "misses" in calibration.message
    assert calibration.roi == pytest.approx(6 / math.sqrt(2), rel=0.1)


def test_paying_nothing_meets_any_target():
    calibration = calibrate(noiseless, (0.0, 4.0), roi_target=1000.0)
    assert calibration.feasible
    assert calibration.multiplier == 4.0
    assert calibration.roi == math.inf
    assert "pays nothing" in calibration.message
    assert calibration.to_dict()["roi"] is None
    json.dumps(calibration.to_dict(), allow_nan=False)


def test_incremental_roi_subtracts_the_baseline():
    def evaluate(multiplier: float):
        revenue, cost = noiseless(multiplier)
        return revenue + 5.0, cost

    average = calibrate(evaluate, CANDIDATES, roi_target=4.0)
    incremental = calibrate(evaluate, CANDIDATES, roi_target=4.0, roi="incremental", baseline=np.full(10, 5.0))
    assert incremental.multiplier == 2.0
    assert incremental.roi == pytest.approx(6 / math.sqrt(2))
    assert incremental.revenue == pytest.approx(6 * math.sqrt(2) + 5)
    assert average.multiplier < incremental.multiplier


def test_a_jump_over_the_target_is_said():
    def evaluate(multiplier: float):
        cost = np.full(10, 3.0 if multiplier < 1.2 else 1.0)
        return (2.0 if multiplier < 1.2 else 5.0) * cost, cost

    found = calibrate(evaluate, CANDIDATES, roi_target=3.0, refine=0.01)
    assert found.roi == 5.0 and found.multiplier == pytest.approx(1.2, abs=0.01)
    below = [e.multiplier for e in found.evaluations if e.multiplier < found.multiplier][-1]
    assert f"There the ROI jumps, from 2 at {below:.4g}:" in found.message
    assert "jumps" not in calibrate(evaluate, CANDIDATES, roi_target=3.0).message
    assert "jumps" not in calibrate(Traffic(2000, 0), CANDIDATES, roi_target=4.0, refine=0.02).message


def test_a_lucky_pass_is_not_trusted():
    # The first candidate passes by luck; everything that speaks against it is more precise.
    roi = {0.0: 2.0, 1.0: 3.05, 2.0: 2.5, 3.0: 2.7, 4.0: 3.5}
    cost = {0.0: 9.0, 1.0: 1.0, 2.0: 5.0, 3.0: 5.0, 4.0: 4.0}
    noise = np.random.default_rng(0).normal(size=400)
    noise -= noise.mean()

    def evaluate(multiplier: float):
        costs = np.full(400, cost[multiplier])
        return roi[multiplier] * costs + noise, costs

    calibration = calibrate(evaluate, tuple(roi), roi_target=3.0)
    assert calibration.multiplier == 4.0
    assert calibration.feasible


def test_a_noisy_safest_multiplier_does_not_veto_a_precise_pass():
    roi = {0.0: 2.0, 1.0: 3.5, 2.0: 2.9}
    cost = {0.0: 5.0, 1.0: 4.0, 2.0: 0.01}
    noise = np.random.default_rng(0).normal(size=400)
    noise -= noise.mean()

    def evaluate(multiplier: float):
        costs = np.full(400, cost[multiplier])
        return roi[multiplier] * costs + noise, costs

    calibration = calibrate(evaluate, tuple(roi), roi_target=3.0)
    assert calibration.multiplier == 1.0


def test_refinement_closes_in_on_the_true_multiplier():
    coarse = calibrate(noiseless, CANDIDATES, roi_target=4.0)
    fine = calibrate(noiseless, CANDIDATES, roi_target=4.0, refine=1e-3)
    assert coarse.multiplier == 2.0
    assert TRUE_MULTIPLIER <= fine.multiplier <= TRUE_MULTIPLIER + 1e-3
    assert fine.roi >= 4.0


def test_refinement_keeps_the_lowest_candidate_where_it_already_meets():
    assert calibrate(noiseless, CANDIDATES, roi_target=1.0, refine=0.01).multiplier == 0.0


def test_confidence_is_more_careful_with_fewer_users():
    few, many, estimate = (
        calibrate(Traffic(users, 3), CANDIDATES, roi_target=4.0, confidence=confidence, refine=1e-3)
        for users, confidence in ((200, 0.95), (20_000, 0.95), (20_000, None))
    )
    assert estimate.multiplier < many.multiplier < few.multiplier
    assert many.intervals["roi"][0] == pytest.approx(4.0, abs=0.01)
    low, high = few.intervals["roi"]
    assert low < few.roi < high


@pytest.mark.parametrize(("confidence", "most", "least"), [(None, 200, 60), (0.95, 15, 2)])
def test_new_users_miss_the_target_as_seldom_as_promised(confidence: float | None, most: int, least: int):
    misses, draws, revenue = 0, 200, []
    for seed in range(draws):
        calibration = calibrate(
            Traffic(300, seed), CANDIDATES, roi_target=4.0, confidence=confidence, refine=0.02, new_users=500
        )
        new_revenue, new_cost = draw(calibration.multiplier, 500, np.random.default_rng(10_000 + seed))
        misses += new_revenue.sum() < 4.0 * new_cost.sum()
        revenue.append(6 * math.sqrt(4 - calibration.multiplier))
    # At confidence .95 ten misses are expected of 200; a plain estimate misses about half the time.
    assert least <= misses <= most
    if confidence is not None:
        assert np.mean(revenue) >= 0.88 * 6 * math.sqrt(4 - TRUE_MULTIPLIER)


def test_new_users_miss_an_incremental_target_as_seldom():
    """Revenue that comes in anyway is of the user's size, and differs by chance between being paid and not."""

    def organic(users: int, seed: int, stream: int):
        size = np.random.default_rng(seed).gamma(2.0, 0.5, size=users)
        return np.random.default_rng((seed, stream)).poisson(3.0 * size).astype(float)

    def paid(multiplier: float, users: int, seed: int):
        revenue, cost = draw(multiplier, users, np.random.default_rng(seed))
        return revenue + organic(users, seed, 1), cost

    misses, revenue = 0, []
    for seed in range(200):
        calibration = calibrate(
            lambda multiplier, seed=seed: paid(multiplier, 300, seed), CANDIDATES, roi_target=4.0, roi="incremental",
            baseline=organic(300, seed, 2), confidence=0.95, refine=0.02, new_users=500,
        )  # fmt: skip
        new_revenue, new_cost = paid(calibration.multiplier, 500, 10_000 + seed)
        misses += (new_revenue - organic(500, 10_000 + seed, 2)).sum() < 4.0 * new_cost.sum()
        revenue.append(6 * math.sqrt(4 - calibration.multiplier))
    assert 2 <= misses <= 15
    assert np.mean(revenue) >= 0.88 * 6 * math.sqrt(4 - TRUE_MULTIPLIER)


def test_intervals_cover_new_users():
    inside = {"roi": 0, "revenue": 0, "cost": 0}
    for seed in range(300):
        intervals = calibrate(Traffic(200, seed), (1.0,), roi_target=1.0, new_users=400).intervals
        revenue, cost = draw(1.0, 400, np.random.default_rng(20_000 + seed))
        new = {"roi": revenue.sum() / cost.sum(), "revenue": revenue.mean(), "cost": cost.mean()}
        for name, (low, high) in intervals.items():
            inside[name] += low <= new[name] <= high
    # Each end at .95, so the interval at .90: 270 of 300, give or take three standard deviations.
    assert all(254 <= count <= 286 for count in inside.values()), inside


def test_ratio_bounds_agree_with_the_delta_method_on_many_users():
    revenue, cost = draw(1.0, 50_000, np.random.default_rng(0))
    deviations = 1.645 * math.sqrt(2 / 50_000)
    estimate = revenue.mean() / cost.mean()
    margin = deviations * np.std(revenue - estimate * cost, ddof=1) / cost.mean()
    assert ratio_bounds(revenue, cost, deviations) == pytest.approx((estimate - margin, estimate + margin), rel=1e-4)


def test_ratio_bounds_are_open_where_cost_cannot_be_told_from_zero():
    cost = np.array([0.0] * 99 + [1.0])
    low, high = ratio_bounds(np.ones(100), cost, 1.645 * math.sqrt(2 / 100))
    assert high == math.inf
    assert 0 < low < 100


@pytest.mark.parametrize("seed", range(20))
def test_pooling_is_isotonic_regression(seed: int):
    generator = np.random.default_rng(seed)
    values, weights = generator.normal(size=12), generator.uniform(0.1, 3.0, size=12)
    expected = isotonic_regression(values, weights=weights).x
    assert pool_increasing(values, weights) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("change", "culprit"),
    [
        ({"candidates": ()}, "candidates"),
        ({"candidates": (1.0, 0.5)}, "candidates"),
        ({"candidates": (-1.0, 0.5)}, "candidates"),
        ({"roi_target": 0.0}, "roi_target"),
        ({"roi": "marginal"}, "roi"),
        ({"roi": "incremental"}, "baseline"),
        ({"roi": "incremental", "baseline": np.zeros(3)}, "baseline"),
        ({"roi": "incremental", "baseline": np.full(10, np.nan)}, "baseline holds NaN or infinity"),
        ({"roi": "incremental", "baseline": np.r_[np.zeros(9), np.inf]}, "baseline holds NaN or infinity"),
        ({"confidence": 0.3}, "confidence"),
        ({"new_users": 0}, "new_users"),
        ({"refine": 0.0}, "refine"),
        ({"evaluate": lambda multiplier: (np.ones(5), np.ones(4))}, "evaluate"),
        ({"evaluate": lambda multiplier: (np.ones(1), np.ones(1))}, "evaluate"),
        ({"evaluate": lambda multiplier: (np.ones((5, 2)), np.ones((5, 2)))}, "evaluate"),
        ({"evaluate": lambda multiplier: (np.ones(5), -np.ones(5))}, "evaluate"),
        ({"evaluate": lambda multiplier: (np.full(5, np.nan), np.ones(5))}, "evaluate"),
    ],
)
def test_bad_arguments_are_named(change: dict, culprit: str):
    arguments = {"evaluate": noiseless, "candidates": CANDIDATES, "roi_target": 4.0} | change
    with pytest.raises(ConfigurationError, match=f"^{culprit}"):
        calibrate(arguments.pop("evaluate"), arguments.pop("candidates"), **arguments)


@pytest.mark.parametrize("module", ["calibration", "candidates"])
def test_the_examples_in_the_docstrings(module: str):
    results = doctest.testmod(importlib.import_module(f"goal.constraint.{module}"))
    assert results.attempted > 0 and results.failed == 0


def test_a_lone_multiplier_that_meets_is_not_called_a_miss() -> None:
    def evaluate(multiplier: float) -> tuple[np.ndarray, np.ndarray]:
        return np.full(50, 5.0 if multiplier == 1 else 1.0), np.ones(50)

    found = calibrate(evaluate, candidates(3.0, step=0.5), roi_target=3.0)
    assert not found.feasible and found.multiplier == 3.0
    assert "1 gives ROI 5" in found.message and "neighbours contradict it" in found.message


def test_refining_ends_between_neighbouring_floats() -> None:
    def evaluate(multiplier: float) -> tuple[np.ndarray, np.ndarray]:
        return np.full(50, 1 + multiplier), np.ones(50)

    found = calibrate(evaluate, candidates(3.0, step=0.5), roi_target=2.3, refine=1e-300)
    assert found.multiplier == pytest.approx(1.3)


def test_estimates_from_a_log_may_put_single_users_below_nothing():
    """Influence values of self-normalised importance sampling: one user in four was paid as the policy would."""

    def evaluate(multiplier: float):
        generator = np.random.default_rng(3)
        values = np.stack(draw(multiplier, 40_000, generator))
        weights = np.where(np.random.default_rng(4).random(40_000) < 0.25, 4.0, 0.0)
        mean = (values * weights).mean(axis=1, keepdims=True) / weights.mean()
        revenue, cost = mean + weights / weights.mean() * (values - mean)
        assert multiplier >= 4 or (cost < 0).any()
        return revenue, cost

    calibration = calibrate(evaluate, CANDIDATES, roi_target=4.0, refine=0.01, confidence=0.9)
    assert calibration.feasible
    assert calibration.multiplier == pytest.approx(TRUE_MULTIPLIER, abs=0.1)
    nothing = np.random.default_rng(5).normal(-1e-4, 1e-3, 400)  # paid, but for the error of estimation
    assert calibrate(lambda multiplier: (np.ones(400), nothing), CANDIDATES, roi_target=4.0).roi == math.inf
    with pytest.raises(ConfigurationError, match=r"costs of mean -1, .*is the sign right"):
        calibrate(lambda multiplier: (np.ones(4), -np.ones(4)), CANDIDATES, roi_target=4.0)
    with pytest.raises(ConfigurationError, match="abstained has none"):
        calibrate(lambda multiplier: (np.empty(0), np.empty(0)), CANDIDATES, roi_target=4.0)
