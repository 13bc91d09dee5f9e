"""Self-normalised importance sampling, by trajectory or by decision."""

from __future__ import annotations

from typing import Literal

import numpy as np

from goal.errors import ConfigurationError
from goal.evaluation.off_policy.decisions import Floats, LoggedDecisions, kish
from goal.evaluation.off_policy.estimate import (
    MINIMUM_EFFECTIVE_SIZE,
    OffPolicyEstimates,
    check_settings,
    conclude,
)


def self_normalized_importance_sampling(
    decisions: LoggedDecisions,
    *,
    weights: Literal["per_decision", "trajectory"] = "per_decision",
    confidence: float = 0.9,
    minimum_effective_size: float = MINIMUM_EFFECTIVE_SIZE,
) -> OffPolicyEstimates:
    """Logged outcomes, weighted by how much likelier the target makes what led to them.

        trajectory:    sum_u w_u,L R_u / sum_u w_u,L L_u
        per decision:  sum_t (n_t / N) (sum_u w_u,t r_u,t / sum_u w_u,t)

    with w_u,t the product of target over logged probability up to step t, R_u and L_u the outcome and the length of
    trajectory u, and n_t trajectories at step t. Neither needs a model or a Markov state; the weights' variance grows
    exponentially with the horizon. Dividing by the sum of weights costs a bias of order 1/n and bounds the estimate by
    the outcomes.

    Source: Precup, Sutton & Singh (2000), "Eligibility traces for off-policy policy evaluation"; Thomas & Brunskill
    (2016), "Data-efficient off-policy policy evaluation for reinforcement learning". Here per decision of the log, so
    that trajectories may differ in length. Intervals by the influence function, over users.

    Args:
        decisions: the logged decisions with the target's probabilities.
        weights: "per_decision" weighs an outcome by the decisions up to it, "trajectory" by all of its trajectory.
        confidence: of the intervals.
        minimum_effective_size: the estimator abstains below, at the step where the weights are most uneven.

    Raises:
        ConfigurationError: a setting cannot work.
    """
    check_settings(confidence, minimum_effective_size)
    if weights not in ("per_decision", "trajectory"):
        raise ConfigurationError(f"weights is {weights!r}: expected 'per_decision' or 'trajectory'")
    ratios = decisions.cumulative_ratios
    influence = (_trajectory if weights == "trajectory" else _per_decision)(decisions, ratios)
    size = float(kish(ratios[:, -1] if weights == "trajectory" else ratios).min())
    return conclude(
        f"self_normalized_importance_sampling ({weights.replace('_', ' ')})",
        decisions,
        influence,
        size,
        confidence=confidence,
        minimum_effective_size=minimum_effective_size,
    )


def _trajectory(decisions: LoggedDecisions, ratios: Floats) -> Floats:
    weights, lengths = ratios[:, -1], decisions.lengths
    totals = decisions.pad(decisions.outcomes).sum(axis=1)
    scale = float((weights * lengths).mean())
    if scale == 0:
        return np.zeros_like(totals)  # it abstains
    value = (weights[:, None] * totals).mean(axis=0) / scale
    return value + weights[:, None] * (totals - value * lengths[:, None]) / scale


def _per_decision(decisions: LoggedDecisions, ratios: Floats) -> Floats:
    present = decisions.present
    weights = np.where(present, ratios, 0.0)
    outcomes = decisions.pad(decisions.outcomes)
    sums = weights.sum(axis=0)
    counts = present.sum(axis=0)
    safe = np.where(sums > 0, sums, 1.0)
    by_step = np.einsum("mt,mtk->tk", weights, outcomes) / safe[:, None]
    value = counts @ by_step / counts.sum()
    error = np.einsum("mt,mtk->mk", weights * (counts / safe), outcomes - by_step)
    return value + (error + present @ (by_step - value)) / decisions.lengths.mean()
