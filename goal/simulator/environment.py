"""A batch of users stepped together in NumPy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from goal.errors import ConfigurationError
from goal.simulator.parameters import Floats, Parameters
from goal.simulator.users import ENGAGEMENT, REVENUE, draw_users, stream


class Step(NamedTuple):
    """What one step brought, each of shape (U,).

    revenue and cost in currency; engaged is true or false; probability is the chance that the engagement had; fatigue
    is what remains after the step, which the next decision meets.
    """

    revenue: Floats
    cost: Floats
    engaged: NDArray[np.bool_]
    probability: Floats
    fatigue: Floats


class VectorEnvironment:
    """Users of one environment, stepped together from fatigue 0 to the horizon.

    Whether user u engages at step t, and the noise of the revenue, are decided by numbers that depend on the seed, u
    and t alone: two policies compared under one seed meet the same users with the same luck. `reset` starts the same
    episode again.

    Args:
        parameters: the environment.
        users: how many users, U.
        seed: of the users and of their luck.

    Raises:
        ConfigurationError: users or seed cannot work.

    Example:
        >>> import numpy as np
        >>> from goal.simulator import VectorEnvironment, preset
        >>> environment = VectorEnvironment(preset("calibrated"), users=1000, seed=0)
        >>> environment.reset().shape
        (1000, 3)
        >>> step = environment.step(np.full(1000, 5.0))
        >>> float(step.cost.mean())
        5.0
    """

    def __init__(self, parameters: Parameters, *, users: int, seed: int) -> None:
        self.types = draw_users(parameters, users=users, seed=seed)
        self.parameters = parameters
        self.users = int(users)
        self.seed = int(seed)
        self.reset()

    @property
    def time(self) -> int:
        """Steps taken since the last reset, 0 to the horizon."""
        return self._time

    @property
    def done(self) -> bool:
        """Whether the episode has reached the horizon."""
        return self._time >= self.parameters.horizon

    @property
    def fatigue(self) -> Floats:
        """Fatigue that the next decision meets, shape (U,), also where the features hide it; read-only."""
        return self._fatigue

    def reset(self) -> NDArray[np.float32]:
        """Starts the episode and returns its first features, shape (U, F)."""
        self._time = 0
        self._fatigue = np.zeros(self.users)
        self._fatigue.setflags(write=False)
        self._engaged = np.zeros(self.users, dtype=np.bool_)
        return self.features()

    def features(self) -> NDArray[np.float32]:
        """What a policy sees before its next decision, shape (U, F), columns as `Parameters.numeric_names`.

        Fatigue where it is not hidden, whether the previous step brought an engagement (0 at the first), and the share
        of the episode that has passed.
        """
        columns = np.empty((self.users, len(self.parameters.numeric_names)), dtype=np.float32)
        if not self.parameters.hidden_fatigue:
            columns[:, 0] = self._fatigue
        columns[:, -2] = self._engaged
        columns[:, -1] = self._time / self.parameters.horizon
        return columns

    def step(self, amounts: ArrayLike) -> Step:
        """Pays every user and returns what came of it.

        Args:
            amounts: shape (U,), in incentive units; the nearest level acts and is paid.

        Raises:
            ConfigurationError: the episode has ended, or amounts have the wrong shape or an illegal value.
        """
        if self.done:
            raise ConfigurationError(f"the episode ended after {self._time} steps: call reset() before another step()")
        amounts = np.asarray(amounts, dtype=np.float64)
        if amounts.shape != (self.users,):
            raise ConfigurationError(f"amounts must have shape ({self.users},), one a user, got {amounts.shape}")
        parameters, types = self.parameters, self.types
        levels = parameters.nearest(amounts)
        responses = parameters.level_responses[levels]
        probability = types.probability(responses, self._fatigue)
        engaged = stream(self.seed, ENGAGEMENT, self._time).random(self.users) < probability
        revenue = np.where(engaged, parameters.revenue_per_engagement, 0.0)
        if parameters.revenue_sigma:
            noise = stream(self.seed, REVENUE, self._time).standard_normal(self.users)[engaged]
            sigma = parameters.revenue_sigma
            revenue[engaged] *= np.exp(sigma * noise - sigma**2 / 2)  # of mean 1
        self._fatigue = types.rho * self._fatigue + parameters.eta * responses
        self._fatigue.setflags(write=False)
        self._engaged = engaged
        self._time += 1
        return Step(revenue, parameters.cost(parameters.levels[levels]), engaged, probability, self._fatigue)
