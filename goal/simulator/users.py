"""The users of an environment: their own parameters, when they arrive, and the streams of chance they meet.

Every random quantity has its own stream, keyed by the seed and by what it is, and user i takes the i-th value of it.
So the same seed gives the same users and the same luck whatever a policy pays, and the first n users of a larger batch
are the users of a batch of n.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from goal.errors import ConfigurationError
from goal.simulator.parameters import Floats, Parameters

BASE_LOGIT: Final = 0
ALPHA: Final = 1
BETA: Final = 2
RHO: Final = 3
ARRIVAL: Final = 4
ENGAGEMENT: Final = 5
REVENUE: Final = 6
BEHAVIOUR: Final = 7


def stream(seed: int, *key: int) -> np.random.Generator:
    """Generator of one random quantity: streams of one seed with different keys are independent."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


def check_users_and_seed(users: int, seed: int) -> None:
    """Raises ConfigurationError where a batch of users cannot be drawn."""
    if not isinstance(users, int | np.integer) or isinstance(users, bool) or users < 1:
        raise ConfigurationError(f"users must be a whole number of at least 1, got {users!r}")
    if not isinstance(seed, int | np.integer) or isinstance(seed, bool) or seed < 0:
        raise ConfigurationError(f"seed must be a whole number of at least 0, got {seed!r}")


@dataclass(frozen=True, eq=False)
class UserTypes:
    """Parameters of every user, each of shape (U,); see `Parameters` for their meaning."""

    base_logit: Floats
    alpha: Floats
    beta: Floats
    rho: Floats

    def __len__(self) -> int:
        return len(self.rho)

    def select(self, users: slice | NDArray[np.int64]) -> UserTypes:
        """The same for some of the users."""
        return UserTypes(self.base_logit[users], self.alpha[users], self.beta[users], self.rho[users])

    def expand(self, dimensions: int) -> UserTypes:
        """The same with trailing axes of length 1, to broadcast against (U, ...) arrays of `dimensions` axes."""
        shape = (-1,) + (1,) * (dimensions - 1)
        return UserTypes(*(x.reshape(shape) for x in (self.base_logit, self.alpha, self.beta, self.rho)))

    def probability(self, responses: Floats, fatigue: Floats) -> Floats:
        """Chance of an engagement, sigmoid(base_logit + alpha * g - beta * f); all arrays are broadcast."""
        return expit(self.base_logit + self.alpha * responses - self.beta * fatigue)


def middle_user(parameters: Parameters) -> UserTypes:
    """The one user at the centre of every spread."""
    return UserTypes(
        *(np.array([value]) for value in (parameters.base_logit, parameters.alpha, parameters.beta, parameters.rho))
    )


def draw_users(parameters: Parameters, *, users: int, seed: int) -> UserTypes:
    """The users that `VectorEnvironment` with the same arguments has.

    base_logit is normal, alpha and beta are log-normal around their medians, rho is uniform.

    Args:
        parameters: the environment; without spreads all users are alike.
        users: how many, U.
        seed: of all streams.

    Raises:
        ConfigurationError: users or seed cannot work.
    """
    check_users_and_seed(users, seed)

    def normal(key: int, spread: float) -> Floats:
        return spread * stream(seed, key).standard_normal(users) if spread else np.zeros(users)

    rho_noise = stream(seed, RHO).uniform(-1.0, 1.0, users) if parameters.rho_spread else np.zeros(users)
    return UserTypes(
        base_logit=parameters.base_logit + normal(BASE_LOGIT, parameters.base_logit_spread),
        alpha=parameters.alpha * np.exp(normal(ALPHA, parameters.alpha_spread)),
        beta=parameters.beta * np.exp(normal(BETA, parameters.beta_spread)),
        rho=parameters.rho + parameters.rho_spread * rho_noise,
    )


def arrivals(parameters: Parameters, *, users: int, seed: int) -> Floats:
    """Time of every user's first step, uniform over the horizon, shape (U,): step t of user u is at arrivals[u] + t.

    Raises:
        ConfigurationError: users or seed cannot work.
    """
    check_users_and_seed(users, seed)
    return stream(seed, ARRIVAL).uniform(0.0, parameters.horizon, users)
