"""Behaviour policies and their propensities."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from goal.errors import ConfigurationError
from goal.simulator import Behaviour, behaviour_policy, preset


def test_greedy_is_the_best_immediate_response() -> None:
    for name in ("paper", "calibrated", "population"):
        parameters = preset(name)
        levels, propensity = behaviour_policy("greedy", parameters).draw(users=5, horizon=4, seed=0)
        best = parameters.expected_revenue(parameters.levels, 0.3).argmax()
        assert (levels == best).all()
        assert parameters.levels[best] == parameters.max_level
        assert (propensity == 1).all()


def test_fixed_medium_pays_the_middle_level() -> None:
    calibrated = preset("calibrated")
    levels, propensity = behaviour_policy("fixed_medium", calibrated).draw(users=5, horizon=4, seed=0)
    assert (calibrated.levels[levels] == 5).all()
    assert (propensity == 1).all()


def test_uniform_pays_every_level_alike() -> None:
    levels, propensity = behaviour_policy("uniform", preset("population")).draw(users=3000, horizon=100, seed=0)
    counts = np.bincount(levels.ravel(), minlength=30)
    assert np.abs(counts - 10_000).max() < 5 * np.sqrt(10_000)
    np.testing.assert_allclose(propensity, 1 / 30)


def test_a_mixture_is_drawn_once_per_trajectory() -> None:
    levels, _ = behaviour_policy("mixture", preset("calibrated")).draw(users=9000, horizon=20, seed=0)
    greedy, medium = (levels == 10).all(1), (levels == 5).all(1)
    assert greedy.mean() == pytest.approx(1 / 3, abs=0.025)
    assert medium.mean() == pytest.approx(1 / 3, abs=0.025)
    rest = levels[~greedy & ~medium]
    assert set(np.unique(rest)) == set(range(11))
    assert rest.mean() == pytest.approx(5, abs=0.05)


def test_the_mixture_s_propensities_by_hand() -> None:
    mixture = behaviour_policy("mixture", preset("calibrated"))
    levels = np.array([[10, 10, 10], [5, 5, 3], [10, 2, 10], [0, 5, 10]])
    u = 1 / 11
    greedy_or_uniform = [(1 + u) / 3, (1 + u**2) / (1 + u), (1 + u**3) / (1 + u**2)]
    medium_then_not = [(1 + u) / 3, (1 + u**2) / (1 + u), u**3 / (1 + u**2)]
    np.testing.assert_allclose(
        mixture.propensity(levels),
        [greedy_or_uniform, medium_then_not, [(1 + u) / 3, u**2 / (1 + u), u], [u / 3, u, u]],
        rtol=1e-12,
    )


def test_propensities_are_conditional_probabilities_of_the_whole_mixture() -> None:
    rng = np.random.default_rng(0)
    behaviour = Behaviour(rng.dirichlet(np.ones(3)), rng.dirichlet(np.ones(4), 3))
    trajectories = np.array(list(itertools.product(range(4), repeat=4)))
    propensity = behaviour.propensity(trajectories)
    likelihood = np.stack([row[trajectories].prod(1) for row in behaviour.probabilities])
    np.testing.assert_allclose(propensity.prod(1), behaviour.weights @ likelihood, rtol=1e-10)
    assert propensity.prod(1).sum() == pytest.approx(1)


def test_long_trajectories_do_not_underflow() -> None:
    _, propensity = behaviour_policy("uniform", preset("population")).draw(users=2, horizon=2000, seed=0)
    np.testing.assert_allclose(propensity, 1 / 30)
    mixture = behaviour_policy("mixture", preset("population"))
    propensity = mixture.propensity(np.full((1, 2000), 29))
    assert propensity[0, -1] == pytest.approx(1)


def test_an_impossible_level_has_propensity_zero() -> None:
    behaviour = Behaviour(np.ones(1), np.array([[1.0, 0.0]]))
    np.testing.assert_array_equal(behaviour.propensity(np.array([[0, 1, 0]])), [[1, 0, 1]])


def test_draws_come_back_for_their_seed_and_do_not_depend_on_the_batch() -> None:
    mixture = behaviour_policy("mixture", preset("calibrated"))
    few, many = (mixture.draw(users=users, horizon=30, seed=2)[0] for users in (10, 50))
    np.testing.assert_array_equal(few, many[:10])
    assert (mixture.draw(users=50, horizon=30, seed=3)[0] != many).any()


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigurationError, match="no behaviour policy 'random': choose one of greedy, uniform"):
        behaviour_policy("random", preset("paper"))
    with pytest.raises(ConfigurationError, match="weights must be distributions that sum to 1"):
        Behaviour(np.array([0.5, 0.6]), np.full((2, 3), 1 / 3))
    with pytest.raises(ConfigurationError, match=r"shapes \(M,\) and \(M, n\), got \(2,\) and \(3, 3\)"):
        Behaviour(np.array([0.5, 0.5]), np.full((3, 3), 1 / 3))
