"""Simulated logs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from goal.errors import ConfigurationError
from goal.log import InteractionLog, Objective, read, write
from goal.simulator import PRESETS, Behaviour, VectorEnvironment, arrivals, behaviour_policy, preset, simulate


def by_user(log: InteractionLog, column: np.ndarray) -> np.ndarray:
    """A column of the log as (U, T, ...)."""
    return column.reshape(log.users, log.schema.horizon, *column.shape[1:])


@pytest.mark.parametrize("name", PRESETS)
def test_a_log_is_what_the_environment_did(name: str) -> None:
    parameters = preset(name)
    log = simulate(parameters, users=40, seed=3)
    assert (log.users, log.events) == (40, 40 * parameters.horizon)
    assert np.isin(log.incentives, parameters.levels).all()
    np.testing.assert_allclose(log.cost, parameters.cost_rate * log.incentives)
    amounts, start = by_user(log, log.incentives), arrivals(parameters, users=40, seed=3)
    environment = VectorEnvironment(parameters, users=40, seed=3)
    for t in range(parameters.horizon):
        np.testing.assert_array_equal(by_user(log, log.numeric)[:, t], environment.features())
        step = environment.step(amounts[:, t])
        np.testing.assert_allclose(by_user(log, log.revenue)[:, t], step.revenue)
        np.testing.assert_array_equal(by_user(log, log.objectives)[:, t, 0], step.engaged)
        np.testing.assert_array_equal(by_user(log, log.time)[:, t], start + t)


def test_the_schema_says_what_is_known() -> None:
    schema = simulate(preset("population"), users=2, seed=0).schema
    assert schema.horizon == 100
    assert schema.cost_rate == 0.01
    assert schema.numeric == ("previous_engagement", "progress")
    assert schema.objectives == (Objective("engaged", "binary"),)
    assert schema.incentive_unit == "coins"


def test_propensities_undo_the_behaviour() -> None:
    parameters = preset("calibrated")
    log = simulate(parameters, "mixture", users=3000, seed=0)
    for amount in (0.0, 5.0, 10.0):
        weights = (log.incentives == amount) / log.propensity
        # An amount's weight has mean 1 at every step; early ones, since a late surprise is rare and weighs very much.
        users = by_user(log, weights)[:, :2].mean(1)
        assert users.mean() == pytest.approx(1, abs=4.5 * users.std() / np.sqrt(3000))
    levels = by_user(log, parameters.nearest(log.incentives))
    np.testing.assert_array_equal(
        by_user(log, log.propensity), behaviour_policy("mixture", parameters).propensity(levels)
    )


def test_a_random_policy_on_the_paper_s_environment_earns_next_to_nothing() -> None:
    log = simulate(preset("paper"), "uniform", users=500, seed=0)
    assert log.revenue.mean() == pytest.approx(0.02, abs=0.005)


def test_a_seed_gives_the_log_again_and_another_gives_other_users() -> None:
    one, two, other = (simulate(preset("population"), users=20, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.revenue, two.revenue)
    np.testing.assert_array_equal(one.incentives, two.incentives)
    assert not np.isin(one.time, other.time).any()
    # Users and luck are the same whatever the behaviour.
    uniform = simulate(preset("population"), "uniform", users=20, seed=1)
    np.testing.assert_array_equal(uniform.time, one.time)
    same = (uniform.incentives == one.incentives).reshape(20, 100).cumprod(1).astype(bool).ravel()
    assert same.any()
    np.testing.assert_array_equal(uniform.revenue[same], one.revenue[same])


def test_a_log_survives_its_file(tmp_path: Path) -> None:
    log = simulate(preset("calibrated"), users=5, seed=0)
    write(log, tmp_path / "log.parquet")
    again = read(tmp_path / "log.parquet", log.schema)
    for name in ("time", "numeric", "incentives", "revenue", "cost", "objectives", "propensity"):
        np.testing.assert_array_equal(getattr(again, name), getattr(log, name))


def test_a_behaviour_of_ones_own() -> None:
    never = Behaviour(np.ones(1), np.eye(11)[:1])
    log = simulate(preset("calibrated"), never, users=3, seed=0)
    assert (log.incentives == 0).all()
    with pytest.raises(ConfigurationError, match="one column a level, 30 in this environment, got 11"):
        simulate(preset("population"), never, users=3, seed=0)
    with pytest.raises(ConfigurationError, match="no behaviour policy 'best'"):
        simulate(preset("population"), "best", users=3, seed=0)
