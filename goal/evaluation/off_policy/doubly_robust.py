"""Doubly robust estimation: a fitted value, corrected by weighted residuals."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from goal.errors import ConfigurationError
from goal.evaluation.off_policy.decisions import Floats, LoggedDecisions, kish
from goal.evaluation.off_policy.estimate import (
    MINIMUM_EFFECTIVE_SIZE,
    OffPolicyEstimates,
    check_settings,
    conclude,
)
from goal.evaluation.off_policy.fitted_q import RIDGE, design, fit, next_value


class ValueModel(Protocol):
    """What `doubly_robust` needs of a model of one's own."""

    def predict(self, decisions: LoggedDecisions) -> tuple[Floats, Floats]:
        """Q of the logged action and V under the target, revenue- and cost-to-go in money, `(N, 2)` each."""
        ...


def doubly_robust(
    decisions: LoggedDecisions,
    *,
    model: ValueModel | None = None,
    folds: int = 5,
    ridge: float = RIDGE,
    confidence: float = 0.9,
    minimum_effective_size: float = MINIMUM_EFFECTIVE_SIZE,
) -> OffPolicyEstimates:
    """Value of the target by a model, plus importance-weighted residuals of that model.

        (1/M) sum_u V_0(s_u0) + sum_t sum_u w_u,t (r_u,t + V_t+1(s_u,t+1) - Q_t(s_u,t, a_u,t)) / sum_u w_u,t

    Right where the propensities are, or the model is; the better the model, the less the weights matter. At a horizon
    of 1 it is Dudik's estimator. The model is `fitted_q_evaluation`'s, cross-fitted: a trajectory is valued by a model
    that has not seen its user.

    Source: Dudik, Langford & Li (2011), "Doubly robust policy evaluation and learning"; Jiang & Li (2016), "Doubly
    robust off-policy value evaluation for reinforcement learning", eq. (10), with the weights normalised at each step
    as in Thomas & Brunskill (2016). They write the same sum as w_t-1 V_t + w_t (r_t - Q_t); a trajectory that has ended
    keeps its last weight, so both agree where lengths differ, and a perfect model leaves no error.

    Args:
        decisions: the logged decisions with the target's probabilities.
        model: a value fitted elsewhere, on other users; None fits one here.
        folds: parts of the users in cross-fitting.
        ridge: of the model, see `fitted_q_evaluation`.
        confidence: of the intervals.
        minimum_effective_size: the estimator abstains below, at the step where the weights are most uneven.

    Raises:
        ConfigurationError: a setting cannot work, or the model predicts other shapes.
    """
    check_settings(confidence, minimum_effective_size)
    centre = decisions.outcomes.mean(axis=0)
    if model is None:
        outcomes = decisions.outcomes - centre
        chosen, value = _cross_fit(decisions, outcomes, folds, ridge)
    else:
        centre = np.zeros_like(centre)
        outcomes = decisions.outcomes
        chosen, value = model.predict(decisions)
        if np.shape(chosen) != outcomes.shape or np.shape(value) != outcomes.shape:
            raise ConfigurationError(
                f"model: predict gave shapes {np.shape(chosen)} and {np.shape(value)}; expected {outcomes.shape} each, "
                "revenue- and cost-to-go at each decision"
            )
    ratios = decisions.cumulative_ratios
    sums = ratios.mean(axis=0)
    weights = ratios / np.where(sums > 0, sums, 1.0)
    residual = decisions.pad(outcomes + next_value(decisions, value) - chosen)
    weighted = np.einsum("mt,mtk->mtk", weights, residual)
    totals = value[decisions.steps == 0] + weighted.sum(axis=1)
    mean, length = totals.mean(axis=0), decisions.lengths.mean()
    # The weights' sums are estimates as well, and so is the mean length.
    influence = totals - (weights - 1) @ weighted.mean(axis=0) - np.outer(decisions.lengths / length - 1, mean)
    return conclude(
        "doubly_robust",
        decisions,
        centre + influence / length,
        float(kish(ratios).min()),
        confidence=confidence,
        minimum_effective_size=minimum_effective_size,
    )


def _cross_fit(decisions: LoggedDecisions, outcomes: Floats, folds: int, ridge: float) -> tuple[Floats, Floats]:
    users = decisions.clusters
    if not 2 <= folds <= users:
        raise ConfigurationError(f"folds is {folds}: expected 2 to {users}, the number of users")
    # Each user's fold is drawn once and for all, so that the same log gives the same estimate.
    part = np.random.default_rng(0).permutation(users) % folds
    owners, rows = part[decisions.owners], part[np.asarray(decisions.users)]
    chosen, value = np.zeros_like(outcomes), np.zeros_like(outcomes)
    steps = design(decisions)
    for fold in range(folds):
        predicted = fit(decisions, steps, owners != fold, outcomes, ridge).predict(steps)
        kept_back = rows == fold
        chosen[kept_back], value[kept_back] = predicted[0][kept_back], predicted[1][kept_back]
    return chosen, value
