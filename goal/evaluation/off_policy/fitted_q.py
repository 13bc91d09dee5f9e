"""Fitted Q evaluation with a value that is linear in features of state and action."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from goal.errors import ConfigurationError
from goal.evaluation.off_policy.decisions import Floats, Integers, LoggedDecisions
from goal.evaluation.off_policy.estimate import (
    MINIMUM_EFFECTIVE_SIZE,
    OffPolicyEstimates,
    check_settings,
    conclude,
    kish,
)

RIDGE = 1.0


def fitted_q_evaluation(
    decisions: LoggedDecisions,
    *,
    ridge: float = RIDGE,
    confidence: float = 0.9,
    minimum_effective_size: float = MINIMUM_EFFECTIVE_SIZE,
) -> OffPolicyEstimates:
    """Value of the target by regression, from the last step to the first.

        Q_t = ridge regression of r_t + V_t+1(s_t+1) on features of (s_t, a_t),  V_t(s) = sum_a pi(a|s) Q_t(s, a)

    The estimate is the mean of V_0 over where trajectories begin. Features are [1, x] and, for each action, [1, x]
    again: an action that is rarely logged leans on the others. The estimate is as good as this linear form; give
    squares or bins as features where the value bends. It uses no propensity, so it needs features that say all of the
    state that both the logged amount and the outcome depend on.

    A linear fit is a weighted mean of logged outcomes, with weights that need no inversion of propensities; their
    effective size and the spread of weighted residuals give the abstention and the interval, which does not cover the
    error of the linear form.

    Source: Le, Voloshin & Yue (2019), "Batch policy learning under constraints", algorithm 3, for a finite horizon;
    Duan, Jia & Wang (2020), "Minimax-optimal off-policy evaluation with linear function approximation" for the weights.

    Args:
        decisions: the logged decisions with the target's probabilities; propensities serve the support check alone.
        ridge: penalty on the squared coefficients of standardised features, the intercept's excepted; in rows.
        confidence: of the intervals.
        minimum_effective_size: the estimator abstains below, at the step where the weights are most uneven.

    Raises:
        ConfigurationError: a setting cannot work.
    """
    check_settings(confidence, minimum_effective_size)
    centre = decisions.outcomes.mean(axis=0)
    model = fit(decisions, np.ones(len(decisions.lengths), dtype=bool), decisions.outcomes - centre, ridge)
    trajectories, own = len(decisions.lengths), np.asarray(decisions.trajectories)
    chosen, value = model.predict(decisions)
    backup = decisions.outcomes - centre + next_value(decisions, value)

    # Forwards: the mean of V_0 is a weighted sum of what follows it, step by step.
    weights, inflation, sizes = np.zeros(len(decisions)), np.ones(len(decisions)), []
    at_first = decisions.steps == 0
    aim = model.basis(decisions, at_first, np.asarray(decisions.target)[at_first]).sum(axis=0)
    for t, factor in enumerate(model.inverses):
        here = np.flatnonzero(decisions.steps == t)
        design = model.basis(decisions, here, _one_hot(decisions, here))
        hat = design @ factor
        weights[here] = hat @ aim
        # What a regression fits of its own noise is missing from its residuals (HC1).
        used = float(np.einsum("np,np->", hat, design))
        inflation[here] = np.sqrt(len(here) / max(len(here) - used, 1.0))
        sizes.append(float(kish(weights[here])) * trajectories / len(here))
        on = here[decisions.lengths[own[here]] > t + 1]
        aim = model.basis(decisions, on + 1, np.asarray(decisions.target)[on + 1]).T @ weights[on]

    residual = (weights * inflation)[:, None] * (backup - chosen)
    influence = value[at_first] + np.stack([np.bincount(own, weights=column) for column in residual.T], axis=1)
    mean = value[at_first].mean(axis=0)
    length = decisions.lengths.mean()
    influence = influence - influence.mean(axis=0) - np.outer(decisions.lengths / length - 1, mean)
    return conclude(
        "fitted_q_evaluation",
        decisions,
        centre + (mean + influence) / length,
        min(sizes),
        confidence=confidence,
        minimum_effective_size=minimum_effective_size,
    )


@dataclass(frozen=True, eq=False)
class LinearQ:
    """A linear value a step.

    Args:
        coefficients: T arrays `(p, k)` for k outcomes.
        inverses: T arrays `(p, p)`, inverses of the penalised sums of squares.
        mean: `(F,)` of the features.
        scale: `(F,)` of the features.
    """

    coefficients: list[Floats]
    inverses: list[Floats]
    mean: Floats
    scale: Floats

    def basis(self, decisions: LoggedDecisions, rows: Integers | np.ndarray, probabilities: Floats) -> Floats:
        """Expected features `(n, p)` of rows over actions of the given probabilities `(n, A)`; p = (1 + F)(1 + A)."""
        scaled = (np.asarray(decisions.features)[rows] - self.mean) / self.scale
        state = np.column_stack((np.ones(len(scaled)), scaled))
        by_action = (probabilities[:, :, None] * state[:, None, :]).reshape(len(state), -1)
        return np.concatenate((state, by_action), axis=1)

    def predict(self, decisions: LoggedDecisions) -> tuple[Floats, Floats]:
        """Q of the logged action and V under the target at each row, `(N, k)` each; 0 past the last fitted step."""
        outcomes = self.coefficients[0].shape[1]
        chosen, value = np.zeros((len(decisions), outcomes)), np.zeros((len(decisions), outcomes))
        for t, coefficients in enumerate(self.coefficients):
            here = np.flatnonzero(decisions.steps == t)
            chosen[here] = self.basis(decisions, here, _one_hot(decisions, here)) @ coefficients
            value[here] = self.basis(decisions, here, np.asarray(decisions.target)[here]) @ coefficients
        return chosen, value


def fit(decisions: LoggedDecisions, kept: np.ndarray, outcomes: Floats, ridge: float = RIDGE) -> LinearQ:
    """Fit the values of `outcomes` `(N, k)` on the trajectories that `kept` `(M,)` selects.

    Raises:
        ConfigurationError: ridge is not positive.
    """
    if not (np.isfinite(ridge) and ridge > 0):
        raise ConfigurationError(f"ridge is {ridge}: expected a positive number of rows, e.g. 1")
    features = np.asarray(decisions.features)
    scale = features.std(axis=0)
    own = np.asarray(decisions.trajectories)
    horizon = int(decisions.lengths[kept].max())
    model = LinearQ([], [], features.mean(axis=0), np.where(scale > 0, scale, 1.0))
    following = np.zeros((len(decisions) + 1, outcomes.shape[1]))  # V of the next step, at each row that has one
    for t in reversed(range(horizon)):
        here = np.flatnonzero((decisions.steps == t) & kept[own])
        design = model.basis(decisions, here, _one_hot(decisions, here))
        last = decisions.lengths[own[here]] == t + 1
        backup = outcomes[here] + np.where(last[:, None], 0.0, following[here + 1])
        penalty = np.full(design.shape[1], ridge)
        penalty[0] = 1e-9 * len(here)  # the intercept
        inverse = np.linalg.inv(design.T @ design + np.diag(penalty))
        coefficients = inverse @ (design.T @ backup)
        following[here] = model.basis(decisions, here, np.asarray(decisions.target)[here]) @ coefficients
        model.coefficients.insert(0, coefficients)
        model.inverses.insert(0, inverse)
    return model


def _one_hot(decisions: LoggedDecisions, rows: Integers) -> Floats:
    one_hot = np.zeros((len(rows), np.shape(decisions.target)[1]))
    one_hot[np.arange(len(rows)), np.asarray(decisions.actions)[rows]] = 1.0
    return one_hot


def next_value(decisions: LoggedDecisions, value: Floats) -> Floats:
    """Value at the next row of the same trajectory `(N, k)`, 0 at its end."""
    last = decisions.steps + 1 == decisions.lengths[np.asarray(decisions.trajectories)]
    return np.where(last[:, None], 0.0, np.roll(value, -1, axis=0))
