"""The environments under gymnasium, one user an episode.

Importing `goal.simulator` registers goal/IncentiveAds-paper-v0, goal/IncentiveAds-calibrated-v0 and
goal/IncentiveAds-population-v0.
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import register, registry
from numpy.typing import NDArray

from goal.errors import ConfigurationError
from goal.simulator.environment import VectorEnvironment
from goal.simulator.parameters import PRESETS, Parameters, load


class IncentiveAds(gymnasium.Env[NDArray[np.float32], np.int64]):
    """Pays one user for one episode; every episode draws a new user and new luck.

    Observation: float32 of shape (F,), the features `Parameters.numeric_names`: fatigue (not in `population`), previous
    engagement, share of the episode passed. Action: the index of a level. Reward: revenue - multiplier * cost. The
    episode terminates at the horizon, which the observation lets a policy foresee. `info` carries revenue, cost,
    engagement_probability, engaged, amount, and fatigue as the next decision meets it; after a reset fatigue alone.

    Args:
        parameters: an environment, a preset's name or a TOML file.
        multiplier: what a unit of cost takes from the reward, the Lagrange multiplier of the budget.
        render_mode: None; there is nothing to draw.

    Raises:
        ConfigurationError: the environment or the multiplier cannot work.

    Example:
        >>> import gymnasium, goal.simulator
        >>> environment = gymnasium.make("goal/IncentiveAds-calibrated-v0", multiplier=1.0)
        >>> observation, info = environment.reset(seed=0)
        >>> observation, reward, terminated, truncated, info = environment.step(10)
        >>> info["cost"]
        10.0
    """

    metadata = {"render_modes": []}  # noqa: RUF012 (gymnasium declares the class attribute so)

    def __init__(
        self, parameters: Parameters | str = "calibrated", *, multiplier: float = 0.0, render_mode: str | None = None
    ) -> None:
        if render_mode is not None:
            raise ConfigurationError(f"render_mode must be None, got {render_mode!r}: there is nothing to draw")
        if not math.isfinite(multiplier):
            raise ConfigurationError(f"multiplier must be finite, got {multiplier}: give a number such as 1.0")
        self.parameters = parameters if isinstance(parameters, Parameters) else load(parameters)
        self.multiplier = float(multiplier)
        self.render_mode = render_mode
        names = self.parameters.numeric_names
        high = np.ones(len(names), dtype=np.float32)
        if "fatigue" in names:
            # One float up, since rounding a fatigue of the maximum must not leave the space.
            high[0] = np.nextafter(np.float32(self.parameters.max_fatigue), np.float32(np.inf))
        self.observation_space = gymnasium.spaces.Box(np.zeros_like(high), high, dtype=np.float32)
        self.action_space = gymnasium.spaces.Discrete(len(self.parameters.levels))
        self._users: VectorEnvironment | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Starts an episode with a new user; `options` has no keys and is ignored."""
        super().reset(seed=seed)
        self._users = VectorEnvironment(self.parameters, users=1, seed=int(self.np_random.integers(2**63)))
        return self._users.features()[0], {"fatigue": 0.0}

    def step(self, action: np.int64) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Pays the level of index `action`; returns observation, reward, terminated, truncated and info."""
        if self._users is None:
            raise ConfigurationError("step() came before the first episode: call reset() first")
        if not self.action_space.contains(action):
            raise ConfigurationError(
                f"action must be the index of a level, 0 to {len(self.parameters.levels) - 1}, got {action}"
            )
        amount = self.parameters.levels[action]
        step = self._users.step(np.array([amount]))
        revenue, cost = float(step.revenue[0]), float(step.cost[0])
        info = {
            "revenue": revenue,
            "cost": cost,
            "engagement_probability": float(step.probability[0]),
            "engaged": bool(step.engaged[0]),
            "amount": float(amount),
            "fatigue": float(step.fatigue[0]),
        }
        return self._users.features()[0], revenue - self.multiplier * cost, self._users.done, False, info


def environment_id(name: str) -> str:
    """Gymnasium id of a preset."""
    return f"goal/IncentiveAds-{name}-v0"


def register_environments() -> None:
    """Puts the presets into gymnasium's registry, once."""
    for name in PRESETS:
        if environment_id(name) not in registry:
            register(environment_id(name), entry_point="goal.simulator.gym:IncentiveAds", kwargs={"parameters": name})
