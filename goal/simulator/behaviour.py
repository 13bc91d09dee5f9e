"""Policies that a log comes from: mixtures, drawn once per trajectory, of fixed distributions over the levels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from goal.errors import ConfigurationError
from goal.simulator.parameters import Floats, Parameters
from goal.simulator.users import BEHAVIOUR, check_users_and_seed, stream

GREEDY: Final = "greedy"
UNIFORM: Final = "uniform"
FIXED_MEDIUM: Final = "fixed_medium"
MIXTURE: Final = "mixture"
BEHAVIOURS: Final = (GREEDY, UNIFORM, FIXED_MEDIUM, MIXTURE)


@dataclass(frozen=True, eq=False)
class Behaviour:
    """A mixture of M components, each paying from one distribution over the n levels at every step.

    Args:
        weights: shape (M,), chance that a trajectory is paid by each component; sums to 1.
        probabilities: shape (M, n), each component's distribution over the levels; rows sum to 1.

    Raises:
        ConfigurationError: the shapes do not fit, or the numbers are not distributions.
    """

    weights: Floats
    probabilities: Floats

    def __post_init__(self) -> None:
        weights, probabilities = (np.asarray(x, dtype=np.float64) for x in (self.weights, self.probabilities))
        if weights.ndim != 1 or probabilities.ndim != 2 or len(weights) != len(probabilities):
            raise ConfigurationError(
                f"weights and probabilities must have shapes (M,) and (M, n), got {weights.shape} and "
                f"{probabilities.shape}: give one row of probabilities a component"
            )
        for name, rows in (("weights", weights[None]), ("probabilities", probabilities)):
            if not ((rows >= 0).all() and np.allclose(rows.sum(1), 1.0)):
                raise ConfigurationError(f"{name} must be distributions that sum to 1, got {rows.tolist()}")
        object.__setattr__(self, "weights", weights)
        object.__setattr__(self, "probabilities", probabilities)

    def check_levels(self, parameters: Parameters) -> None:
        """Raises ConfigurationError where the distributions are not over the environment's levels."""
        count, expected = self.probabilities.shape[1], len(parameters.levels)
        if count != expected:
            raise ConfigurationError(
                f"probabilities must have one column a level, {expected} in this environment, got {count}: "
                "give a distribution over Parameters.levels"
            )

    def draw(self, *, users: int, horizon: int, seed: int) -> tuple[NDArray[np.int64], Floats]:
        """Levels that the behaviour pays, and their propensities.

        Args:
            users: trajectories, U.
            horizon: steps of each, T.
            seed: of the behaviour's own streams; the users' luck does not depend on them.

        Returns:
            Level indices (U, T) and, of the same shape, the chance that the behaviour, not knowing which component was
            drawn, pays that level given the levels it paid before.

        Raises:
            ConfigurationError: users or seed cannot work.
        """
        check_users_and_seed(users, seed)
        component = _invert(self.weights, stream(seed, BEHAVIOUR, 0).random(users))
        # One row a user, so that the first n users of a larger draw are the users of a draw of n.
        uniforms = stream(seed, BEHAVIOUR, 1).random((users, horizon))
        levels = np.empty((users, horizon), dtype=np.int64)
        for index in range(len(self.weights)):
            rows = component == index
            levels[rows] = _invert(self.probabilities[index], uniforms[rows])
        return levels, self.propensity(levels)

    def propensity(self, levels: NDArray[np.int64]) -> Floats:
        """Chance of each level given the trajectory so far, over the mixture, shape (U, T).

        With w the posterior over components given the levels before t, starting at the weights: sum_m w_m p_m(level_t).
        None of the components reads the state, so the trajectory's levels are all that tells them apart.

        Args:
            levels: level indices, shape (U, T).
        """
        posterior = np.broadcast_to(self.weights, (len(levels), len(self.weights)))
        propensities = np.empty(levels.shape)
        for step in range(levels.shape[1]):
            joint = posterior * self.probabilities[:, levels[:, step]].T
            propensities[:, step] = joint.sum(1)
            # A level that no component pays has propensity 0, and nothing is learned from it.
            possible = propensities[:, step, None] > 0
            posterior = np.where(possible, joint / np.where(possible, propensities[:, step, None], 1.0), posterior)
        return propensities


def behaviour_policy(name: str, parameters: Parameters) -> Behaviour:
    """A named behaviour policy of an environment.

    Args:
        name: "greedy" pays the largest level, which is the best immediate response; "uniform" draws a level at every
            step; "fixed_medium" pays the level in the middle of the grid; "mixture" is one of the three, drawn with
            equal chance once per trajectory (the paper's mixed behaviour policy).
        parameters: the environment, for its levels.

    Raises:
        ConfigurationError: no behaviour policy has that name.
    """
    count = len(parameters.levels)
    one_hot = np.eye(count)
    rows = {GREEDY: one_hot[-1], UNIFORM: np.full(count, 1 / count), FIXED_MEDIUM: one_hot[count // 2]}
    if name == MIXTURE:
        return Behaviour(np.full(3, 1 / 3), np.stack(list(rows.values())))
    if name not in rows:
        raise ConfigurationError(f"there is no behaviour policy {name!r}: choose one of {', '.join(BEHAVIOURS)}")
    return Behaviour(np.ones(1), rows[name][None])


def _invert(probabilities: Floats, uniforms: Floats) -> NDArray[np.int64]:
    """Draws by inverting the distribution `probabilities` (n,) at `uniforms` of any shape."""
    cumulative = np.cumsum(probabilities)
    # Divided by its end, which rounding may leave beside 1, so that a level of chance 0 is never drawn at the edge.
    return np.searchsorted(cumulative / cumulative[-1], uniforms, side="right")
