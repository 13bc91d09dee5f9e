"""The gymnasium environments."""

from __future__ import annotations

import dataclasses

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from goal.errors import ConfigurationError
from goal.simulator import PRESETS, preset
from goal.simulator.gym import IncentiveAds


@pytest.mark.parametrize("name", PRESETS)
def test_gymnasium_finds_nothing_to_warn_of(name: str) -> None:
    environment = gymnasium.make(f"goal/IncentiveAds-{name}-v0")  # pytest turns warnings into errors
    check_env(environment.unwrapped)
    assert isinstance(environment.action_space, gymnasium.spaces.Discrete)
    assert environment.action_space.n == len(preset(name).levels)


@pytest.mark.parametrize("name", PRESETS)
def test_an_episode_ends_at_the_horizon_and_stays_in_its_space(name: str) -> None:
    parameters = preset(name)
    environment = gymnasium.make(f"goal/IncentiveAds-{name}-v0", multiplier=0.5)
    observation, info = environment.reset(seed=4)
    assert info == {"fatigue": 0.0}
    fatigue = 0.0
    for t in range(parameters.horizon):
        observation, reward, terminated, truncated, info = environment.step(len(parameters.levels) - 1)
        assert observation in environment.observation_space
        assert set(info) >= {"revenue", "cost", "engagement_probability", "fatigue"}
        assert reward == pytest.approx(info["revenue"] - 0.5 * info["cost"])
        assert info["cost"] == pytest.approx(parameters.cost_rate * parameters.max_level)
        assert info["amount"] == parameters.max_level
        assert 0 <= info["engagement_probability"] <= 1
        assert info["fatigue"] > fatigue
        fatigue = info["fatigue"]
        assert terminated == (t == parameters.horizon - 1)
        assert not truncated
    assert observation[-1] == 1.0
    assert ("fatigue" in parameters.numeric_names) == bool(observation[0] == np.float32(fatigue))


def test_episodes_bring_new_users_and_a_seed_brings_them_back() -> None:
    environment = gymnasium.make("goal/IncentiveAds-population-v0")

    def probabilities(episodes: int) -> list[float]:
        values = []
        for _ in range(episodes):
            environment.reset()
            values.append(environment.step(20)[4]["engagement_probability"])
        return values

    environment.reset(seed=1)
    first = probabilities(5)
    assert len(set(first)) == 5
    environment.reset(seed=1)
    assert probabilities(5) == first


def test_an_environment_of_ones_own() -> None:
    parameters = dataclasses.replace(preset("calibrated"), horizon=3, max_level=2)
    environment = gymnasium.make("goal/IncentiveAds-paper-v0", parameters=parameters)
    assert environment.action_space == gymnasium.spaces.Discrete(3)
    check_env(environment.unwrapped)


def test_mistakes_are_named() -> None:
    environment = IncentiveAds("calibrated")
    with pytest.raises(ConfigurationError, match="call reset"):
        environment.step(np.int64(0))
    environment.reset(seed=0)
    with pytest.raises(ConfigurationError, match="action must be the index of a level, 0 to 10, got 11"):
        environment.step(np.int64(11))
    with pytest.raises(ConfigurationError, match="multiplier must be finite"):
        IncentiveAds("calibrated", multiplier=float("nan"))
    with pytest.raises(ConfigurationError, match="render_mode must be None, got 'human'"):
        IncentiveAds("calibrated", render_mode="human")
