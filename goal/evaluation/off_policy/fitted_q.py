"""Fitted Q evaluation with a value that is linear in features of state and action."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from goal.errors import ConfigurationError
from goal.evaluation.off_policy.decisions import Floats, Integers, LoggedDecisions, kish
from goal.evaluation.off_policy.estimate import (
    MINIMUM_EFFECTIVE_SIZE,
    OffPolicyEstimates,
    check_settings,
    conclude,
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
    outcomes = decisions.outcomes - centre
    trajectories, own = len(decisions.lengths), np.asarray(decisions.trajectories)
    steps = design(decisions)
    model = fit(decisions, steps, np.ones(trajectories, dtype=bool), outcomes, ridge)
    chosen, value = model.predict(steps)
    residual = outcomes + next_value(decisions, value) - chosen

    # Forwards: the mean of V_0 is a weighted sum of what follows it, step by step.
    weights, inflation, sizes = np.zeros(len(decisions)), np.ones(len(decisions)), []
    carried = np.ones(trajectories)
    for step, inverse in zip(steps, model.inverses, strict=True):
        here = step.rows
        hat = step.logged @ inverse
        weights[here] = hat @ (step.expected.T @ carried[own[here]])
        carried[own[here]] = weights[here]
        # What a regression fits of its own noise is missing from its residuals (HC1).
        used = float(np.einsum("np,np->", hat, step.logged))
        inflation[here] = np.sqrt(len(here) / max(len(here) - used, 1.0))
        sizes.append(float(kish(weights[here])) * trajectories / len(here))

    # The weighted residuals are zero on average but for what the penalty shrank: that is put back.
    def total(scale: Floats) -> Floats:
        return value[steps[0].rows] + np.stack(
            [np.bincount(own, weights=scale * column) for column in residual.T], axis=1
        )

    mean, spread, length = total(weights).mean(axis=0), total(weights * inflation), decisions.lengths.mean()
    influence = mean + spread - spread.mean(axis=0) - np.outer(decisions.lengths / length - 1, mean)
    return conclude(
        "fitted_q_evaluation",
        decisions,
        centre + influence / length,
        min(sizes),
        confidence=confidence,
        minimum_effective_size=minimum_effective_size,
    )


@dataclass(frozen=True, eq=False)
class Step:
    """Features of the decisions at one step, p = (1 + F)(1 + A).

    Args:
        rows: `(n,)` the decisions.
        logged: `(n, p)` features of state and logged action.
        expected: `(n, p)` their mean over the target's actions.
    """

    rows: Integers
    logged: Floats
    expected: Floats


def design(decisions: LoggedDecisions) -> list[Step]:
    """Features of all decisions, a step at a time."""
    target, features = np.asarray(decisions.target), np.asarray(decisions.features)
    scale = features.std(axis=0)
    scaled = (features - features.mean(axis=0)) / np.where(scale > 0, scale, 1.0)
    state = np.column_stack((np.ones(len(scaled)), scaled))
    one_hot = np.eye(target.shape[1])
    order = np.argsort(decisions.steps, kind="stable")
    steps = []
    for rows in np.split(order, np.cumsum(np.bincount(decisions.steps))[:-1]):
        logged, expected = (
            np.concatenate((state[rows], np.einsum("na,nf->naf", chance, state[rows]).reshape(len(rows), -1)), axis=1)
            for chance in (one_hot[np.asarray(decisions.actions)[rows]], target[rows])
        )
        steps.append(Step(rows, logged, expected))
    return steps


@dataclass(frozen=True, eq=False)
class LinearQ:
    """A linear value for each step.

    Args:
        coefficients: T arrays `(p, k)` for k outcomes.
        inverses: T arrays `(p, p)`, inverses of the penalised sums of squares.
    """

    coefficients: list[np.ndarray]
    inverses: list[np.ndarray]

    def predict(self, steps: list[Step]) -> tuple[Floats, Floats]:
        """Q of the logged action and V under the target at each row, `(N, k)` each; 0 past the last fitted step."""
        shape = sum(len(step.rows) for step in steps), self.coefficients[0].shape[1]
        chosen, value = np.zeros(shape), np.zeros(shape)
        for step, coefficients in zip(steps, self.coefficients, strict=False):
            chosen[step.rows] = step.logged @ coefficients
            value[step.rows] = step.expected @ coefficients
        return chosen, value


def fit(
    decisions: LoggedDecisions, steps: list[Step], kept: np.ndarray, outcomes: Floats, ridge: float = RIDGE
) -> LinearQ:
    """Fit the values of `outcomes` `(N, k)` on the trajectories that `kept` `(M,)` selects.

    Raises:
        ConfigurationError: ridge is not positive.
    """
    if not (np.isfinite(ridge) and ridge > 0):
        raise ConfigurationError(f"ridge is {ridge}: expected a positive number of rows, e.g. 1")
    own = np.asarray(decisions.trajectories)
    model = LinearQ([], [])
    following = np.zeros((len(kept), outcomes.shape[1]))  # V of each trajectory's next step, 0 past its end
    for step in reversed(steps[: int(decisions.lengths[kept].max())]):
        use = kept[own[step.rows]]
        rows, logged = step.rows[use], step.logged[use]
        penalty = np.full(logged.shape[1], ridge)
        penalty[0] = 1e-9 * len(rows)  # the intercept
        inverse = np.linalg.inv(logged.T @ logged + np.diag(penalty))
        coefficients = inverse @ (logged.T @ (outcomes[rows] + following[own[rows]]))
        following[own[rows]] = step.expected[use] @ coefficients
        model.coefficients.insert(0, coefficients)
        model.inverses.insert(0, inverse)
    return model


def next_value(decisions: LoggedDecisions, value: Floats) -> Floats:
    """Value at the next row of the same trajectory `(N, k)`, 0 at its end."""
    last = decisions.steps + 1 == decisions.lengths[np.asarray(decisions.trajectories)]
    return np.where(last[:, None], 0.0, np.roll(value, -1, axis=0))
