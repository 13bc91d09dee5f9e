"""The vectorised environment: dynamics, streams of chance, features, speed."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest

from goal.errors import ConfigurationError
from goal.simulator import Step, VectorEnvironment, arrivals, draw_users, preset


def episode(environment: VectorEnvironment, amounts: np.ndarray) -> list[Step]:
    """Steps of an episode that pays amounts (T, U)."""
    environment.reset()
    return [environment.step(row) for row in amounts]


def random_amounts(name: str, users: int, seed: int) -> np.ndarray:
    parameters = preset(name)
    return np.random.default_rng(seed).choice(parameters.levels, (parameters.horizon, users))


@pytest.mark.parametrize("name", ["paper", "calibrated", "population"])
def test_steps_follow_the_formulas(name: str) -> None:
    parameters = preset(name)
    environment = VectorEnvironment(parameters, users=50, seed=3)
    types = draw_users(parameters, users=50, seed=3)
    fatigue = np.zeros(50)
    for row in random_amounts(name, 50, 0):
        response = np.log(1 + row / 30) if name == "population" else row
        np.testing.assert_allclose(environment.fatigue, fatigue)
        step = environment.step(row)
        logits = types.base_logit + types.alpha * response - types.beta * fatigue
        fatigue = types.rho * fatigue + parameters.eta * response
        np.testing.assert_allclose(step.probability, 1 / (1 + np.exp(-logits)), rtol=1e-9)
        np.testing.assert_allclose(step.fatigue, fatigue)
        np.testing.assert_allclose(step.cost, parameters.cost_rate * row)
        np.testing.assert_array_equal(step.revenue > 0, step.engaged)
        if not parameters.revenue_sigma:
            np.testing.assert_array_equal(step.revenue, parameters.revenue_per_engagement * step.engaged)
    assert environment.done


def test_engagements_have_their_probability() -> None:
    environment = VectorEnvironment(preset("calibrated"), users=20_000, seed=0)
    excess = []
    for row in random_amounts("calibrated", 20_000, 1)[:40]:
        step = environment.step(row)
        error = np.sqrt((step.probability * (1 - step.probability)).sum())
        excess.append((step.engaged.sum() - step.probability.sum()) / error)
    assert np.abs(excess).max() < 4.5
    assert 0.6 < np.std(excess) < 1.5


def test_population_revenue_is_log_normal_around_its_mean() -> None:
    environment = VectorEnvironment(preset("population"), users=50_000, seed=0)
    step = environment.step(np.full(50_000, 3000.0))
    revenue = step.revenue[step.engaged]
    assert revenue.mean() == pytest.approx(30, abs=5 * revenue.std() / np.sqrt(len(revenue)))
    assert np.log(revenue).std() == pytest.approx(0.5, abs=0.01)


def test_population_users_are_drawn_as_described() -> None:
    types = draw_users(preset("population"), users=100_000, seed=0)
    assert types.base_logit.mean() == pytest.approx(-3, abs=0.01)
    assert types.base_logit.std() == pytest.approx(0.5, abs=0.01)
    assert np.median(types.alpha) == pytest.approx(1.6, abs=0.01)
    assert np.log(types.alpha).std() == pytest.approx(0.25, abs=0.005)
    assert np.median(types.beta) == pytest.approx(1.2, abs=0.01)
    assert np.log(types.beta).std() == pytest.approx(0.3, abs=0.005)
    assert types.rho.min() >= 0.85
    assert types.rho.max() <= 0.95
    assert types.rho.std() == pytest.approx(0.1 / np.sqrt(12), abs=0.001)
    drawn = np.stack([types.base_logit, np.log(types.alpha), np.log(types.beta), types.rho])
    assert np.abs(np.corrcoef(drawn) - np.eye(4)).max() < 0.02


@pytest.mark.parametrize("name", ["calibrated", "population"])
def test_a_seed_gives_the_same_users_and_luck_whatever_is_paid(name: str) -> None:
    first, second = (VectorEnvironment(preset(name), users=200, seed=5) for _ in range(2))
    np.testing.assert_array_equal(first.types.alpha, second.types.alpha)
    amounts = random_amounts(name, 200, 0)
    again = amounts.copy()
    again[:, 100:] = random_amounts(name, 200, 1)[:, 100:]
    for one, two in zip(episode(first, amounts), episode(second, again), strict=True):
        for mine, theirs in zip(one, two, strict=True):
            np.testing.assert_array_equal(mine[:100], theirs[:100])
        # A user who engages at the smaller probability engages at the larger.
        more = two.probability >= one.probability
        assert (two.engaged >= one.engaged)[more].all()
        both = one.engaged & two.engaged
        np.testing.assert_array_equal(one.revenue[both], two.revenue[both])


def test_reset_starts_the_same_episode_again() -> None:
    environment = VectorEnvironment(preset("population"), users=30, seed=5)
    amounts = random_amounts("population", 30, 0)
    for one, two in zip(episode(environment, amounts), episode(environment, amounts), strict=True):
        np.testing.assert_array_equal(one.revenue, two.revenue)


def test_users_do_not_depend_on_how_many_there_are() -> None:
    parameters = preset("population")
    few, many = (VectorEnvironment(parameters, users=users, seed=9) for users in (7, 40))
    np.testing.assert_array_equal(few.types.rho, many.types.rho[:7])
    np.testing.assert_array_equal(arrivals(parameters, users=7, seed=9), arrivals(parameters, users=40, seed=9)[:7])
    for _ in range(20):
        one, two = few.step(np.full(7, 100.0)), many.step(np.full(40, 100.0))
        np.testing.assert_array_equal(one.revenue, two.revenue[:7])


def test_other_seeds_give_other_users_and_luck() -> None:
    parameters = preset("population")
    one, two = (VectorEnvironment(parameters, users=100, seed=seed) for seed in (1, 2))
    assert not np.isin(one.types.alpha, two.types.alpha).any()
    engaged = [[environment.step(np.full(100, 50.0)).engaged for _ in range(100)] for environment in (one, two)]
    assert (np.array(engaged[0]) != np.array(engaged[1])).any(0).mean() > 0.9
    assert (np.array(engaged[0])[1:] != np.array(engaged[0])[:-1]).any(1).all()


def test_features_are_what_is_known_before_the_decision() -> None:
    environment = VectorEnvironment(preset("calibrated"), users=400, seed=0)
    features = environment.reset()
    assert features.dtype == np.float32
    np.testing.assert_array_equal(features, np.zeros((400, 3)))
    step = environment.step(np.full(400, 6.0))
    features = environment.features()
    np.testing.assert_allclose(features[:, 0], 0.3, rtol=1e-6)
    np.testing.assert_array_equal(features[:, 1], step.engaged)
    np.testing.assert_allclose(features[:, 2], 0.01)
    hidden = VectorEnvironment(preset("population"), users=4, seed=0)
    hidden.step(np.full(4, 3000.0))
    assert hidden.features().shape == (4, 2)
    assert (hidden.fatigue > 0).all()


def test_amounts_are_snapped_before_they_act_and_are_paid() -> None:
    one, two = (VectorEnvironment(preset("calibrated"), users=3, seed=0) for _ in range(2))
    rough, exact = one.step([0.2, 4.6, 99.0]), two.step([0.0, 5.0, 10.0])
    for mine, theirs in zip(rough, exact, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(rough.cost, [0, 5, 10])


def test_arrivals_are_uniform_over_the_horizon() -> None:
    start = arrivals(preset("calibrated"), users=20_000, seed=0)
    assert start.min() >= 0
    assert start.max() < 100
    assert start.mean() == pytest.approx(50, abs=1)
    assert len(np.unique(start)) == 20_000


def test_mistakes_are_named() -> None:
    parameters = dataclasses.replace(preset("calibrated"), horizon=1)
    with pytest.raises(ConfigurationError, match="users must be a whole number of at least 1, got 0"):
        VectorEnvironment(parameters, users=0, seed=0)
    with pytest.raises(ConfigurationError, match="seed must be a whole number of at least 0, got -1"):
        VectorEnvironment(parameters, users=1, seed=-1)
    environment = VectorEnvironment(parameters, users=2, seed=0)
    with pytest.raises(ConfigurationError, match=r"amounts must have shape \(2,\), one a user, got \(3,\)"):
        environment.step(np.zeros(3))
    environment.step(np.zeros(2))
    with pytest.raises(ConfigurationError, match="episode ended after 1 steps: call reset"):
        environment.step(np.zeros(2))


def test_a_million_user_steps_take_less_than_a_second() -> None:
    environment = VectorEnvironment(preset("calibrated"), users=10_000, seed=0)
    amounts = random_amounts("calibrated", 10_000, 0)
    fastest = np.inf
    for _ in range(3):
        start = time.perf_counter()
        episode(environment, amounts)
        fastest = min(fastest, time.perf_counter() - start)
    assert fastest < 1.0
