"""Sweeps, distributions of amounts and expert usage."""

from __future__ import annotations

import dataclasses
import doctest
import json
import math

import numpy as np
import pytest

from goal.errors import ConfigurationError
from goal.evaluation import (
    Constant,
    OraclePolicy,
    amount_distribution,
    behaviour_points,
    expert_usage,
    experts,
    of_first_users,
    oracle_frontier,
    rollout,
    sweep,
)
from goal.evaluation.metrics import roi_violation_rate
from goal.simulator import preset

CALIBRATED = preset("calibrated")
MULTIPLIERS = (0.0, 2.0, 3.0)


@pytest.fixture(scope="module")
def oracle_sweep():
    return sweep(OraclePolicy(), CALIBRATED, MULTIPLIERS, users=1500, seed=0, roi_target=3.0)


def test_rows_hold_the_keys_of_the_summary(oracle_sweep):
    required = {"multiplier", "rev", "cost", "roi", "rvr", "value", "oracle_value", "reference_value"}
    assert [row["multiplier"] for row in oracle_sweep.rows] == list(MULTIPLIERS)
    assert all(required <= set(row) for row in oracle_sweep.rows)
    json.dumps(oracle_sweep.rows, allow_nan=False)
    assert (oracle_sweep.window, oracle_sweep.stride) == (1000, 250)


def test_rows_follow_from_the_rollouts(oracle_sweep):
    for row, made in zip(oracle_sweep.rows, oracle_sweep.rollouts, strict=True):
        assert row["rev"] == pytest.approx(made.revenue.mean())
        assert row["cost"] == pytest.approx(made.cost.mean())
        assert row["roi"] == pytest.approx(made.revenue.sum() / made.cost.sum())
        assert row["value"] == pytest.approx((made.revenue - made.multiplier * made.cost).mean())
        stream = made.stream()
        assert row["rvr"] == roi_violation_rate(stream.revenue, stream.cost, target=3.0, window=1000, stride=250)
        gain = made.revenue.mean() - oracle_sweep.never_pay_rev
        assert row["incremental_roi"] == pytest.approx(gain / made.cost.mean())


def test_fewer_users_are_measured_without_another_rollout(oracle_sweep):
    few = of_first_users(oracle_sweep, CALIBRATED, 200, seed=0, roi_target=3.0, window=500)
    again = sweep(OraclePolicy(), CALIBRATED, MULTIPLIERS, users=200, seed=0, roi_target=3.0, window=500)
    assert few.rows == again.rows
    assert (few.never_pay_rev, few.window, few.stride) == (again.never_pay_rev, again.window, again.stride)


def test_fewer_users_who_differ_are_measured_against_their_own_oracle():
    parameters = dataclasses.replace(preset("population"), horizon=12)
    many, again = (
        sweep(Constant(7.0), parameters, (0.0, 2.0), users=users, seed=3, roi_target=3.0, window=60)
        for users in (30, 9)
    )
    few = of_first_users(many, parameters, 9, seed=3, roi_target=3.0, window=60)
    for ours, theirs in zip(few.rows, again.rows, strict=True):
        assert ours == pytest.approx(theirs)


def test_the_oracle_has_all_of_the_gain_and_the_published_values(oracle_sweep):
    for row, value in zip(oracle_sweep.rows, (16.645, 4.393, 1.797), strict=True):
        assert row["oracle_value"] == pytest.approx(value, abs=2e-3)
        assert row["share_of_gain"] == pytest.approx(1.0, abs=0.12)
        assert abs(row["regret"]) < 4 * row["rev_error"]
    assert oracle_sweep.rows[2]["reference_value"] == pytest.approx(1.423, abs=1e-3)


def test_never_paying_has_no_roi_and_no_gain():
    made = sweep(Constant(0.0), CALIBRATED, (3.0,), users=200, seed=0, roi_target=3.0, window=100, stride=10)
    (row,) = made.rows
    assert row["roi"] is None and row["incremental_roi"] is None
    assert row["rvr"] == 0.0
    assert row["rev"] == made.never_pay_rev
    assert made.stride == 10


def test_without_the_oracle_its_columns_are_none():
    (row,) = sweep(Constant(1.0), CALIBRATED, (1.0,), users=20, seed=0, roi_target=3.0, oracle=False).rows
    assert row["oracle_value"] is row["reference_value"] is row["share_of_gain"] is row["regret"] is None


def test_a_window_longer_than_the_stream_is_an_error_before_the_rollout():
    with pytest.raises(ConfigurationError, match="window is 1000"):
        sweep(Constant(1.0), CALIBRATED, (1.0,), users=2, seed=0, roi_target=3.0)


def test_the_frontier_falls_in_cost_and_the_behaviours_lie_below_it():
    frontier = oracle_frontier(CALIBRATED, MULTIPLIERS, users=1, seed=0)
    assert np.all(np.diff([point["cost"] for point in frontier]) < 0)
    points = {point["name"]: point for point in behaviour_points(CALIBRATED, users=100, seed=0)}
    assert set(points) == {"greedy", "uniform", "fixed medium", "mixture"}
    assert points["greedy"]["cost"] == 10.0
    assert all(point["rev"] < frontier[0]["rev"] for point in points.values())


def test_amounts_are_counted_in_bins_that_keep_zero_apart():
    made = {amount: rollout(Constant(amount), CALIBRATED, 0.0, users=3, seed=0).amounts for amount in (0.0, 1.0, 10.0)}
    fine = amount_distribution(made, CALIBRATED.levels)
    assert fine["amounts"] == [str(level) for level in range(11)]
    assert np.array_equal(np.argmax(fine["share"], axis=1), [0, 1, 10])
    coarse = amount_distribution(made, CALIBRATED.levels, bins=3)
    assert coarse["amounts"] == ["0", "1–5", "6–10"]
    assert coarse["share"] == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    with pytest.raises(ConfigurationError, match="paid"):
        amount_distribution({}, CALIBRATED.levels)
    with pytest.raises(ConfigurationError, match="bins"):
        amount_distribution(made, CALIBRATED.levels, bins=1)


def test_expert_usage_against_a_loop():
    generator = np.random.default_rng(0)
    routing, multipliers = generator.random((300, 4)), generator.choice([0.0, 0.5, 3.0], size=300)
    usage = expert_usage(routing, multipliers)
    for multiplier, row in zip(usage.multipliers, usage.usage, strict=True):
        rows = [given / given.sum() for given, at in zip(routing, multipliers, strict=True) if at == multiplier]
        assert row == pytest.approx(sum(rows) / len(rows))
    assert usage.usage.sum(axis=1) == pytest.approx(1.0)
    assert json.loads(json.dumps(usage.to_dict()))["multipliers"] == [0.0, 0.5, 3.0]


def test_effective_experts_count_what_is_used():
    usage = expert_usage([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]], [0.0, 1.0])
    assert usage.effective_experts == pytest.approx([1.0, 3.0])
    assert math.isclose(expert_usage([[2.0, 2.0]], [0.0]).effective_experts[0], 2.0)


@pytest.mark.parametrize("routing", [[[0.0, 0.0]], [[-1.0, 2.0]], [[float("nan"), 1.0]], [1.0], [[0.5, 0.5]] * 2])
def test_expert_usage_rejects(routing):
    with pytest.raises(ConfigurationError, match="routing"):
        expert_usage(routing, [0.0])


def test_the_examples_in_the_docstrings():
    assert doctest.testmod(experts).failed == 0
