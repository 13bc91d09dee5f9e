"""What a log without a simulator can say of a policy: support, confounding and estimates, for the report."""

from __future__ import annotations

from typing import Any

import numpy as np

from goal.evaluation.off_policy.confounding import confounding, state_features
from goal.evaluation.off_policy.decisions import Floats, Integers, LoggedDecisions, nearest
from goal.evaluation.off_policy.doubly_robust import doubly_robust
from goal.evaluation.off_policy.estimate import Estimate, OffPolicyEstimates
from goal.evaluation.off_policy.fitted_q import fitted_q_evaluation
from goal.evaluation.off_policy.importance_sampling import self_normalized_importance_sampling
from goal.evaluation.off_policy.marginalized import marginalized_importance_sampling
from goal.evaluation.off_policy.support import WARN, amount_support, support
from goal.log import InteractionLog

HORIZONS = (1, 5)
MOST_AMOUNTS = 64
MOST_ROWS = 20_000
"""Decisions that the estimates read, about: of a longer log, those of every second, third, ... user."""
FEWEST_USERS = 10


def log_evidence(log: InteractionLog, rows: Integers, amounts: Floats) -> dict[str, Any]:
    """Off-policy evidence about the policy that pays `amounts` at `rows` of a log.

    Args:
        log: the log.
        rows: `(n,)` ascending rows that the policy has not learned from.
        amounts: `(n,)` what it would pay there.

    Returns:
        Plain values for JSON: "warnings" of missing support and of confounding; "confounding" with both shares;
        "estimates", a row for each estimator and horizon (in decisions; the states where they begin are the log's);
        "note" where there are no estimates, and why.
    """
    warnings: list[str] = []
    never, rarely = amount_support(log.incentives, amounts)
    for share, how in ((never, "never"), (rarely, "fewer than 10 times")):
        if share > WARN:
            warnings.append(
                f"Support is missing: {share:.1%} of the policy's payments are of amounts that the log shows {how} "
                "(within 10%). What they do is extrapolated."
            )
    result: dict[str, Any] = {"warnings": warnings, "confounding": None, "estimates": [], "note": None}
    stride = -(-log.events // (5 * MOST_ROWS))
    taken = np.flatnonzero(log.user_index % stride == 0)
    if len(np.unique(log.user_index[taken])) >= FEWEST_USERS:
        found = confounding(
            log.incentives[taken],
            log.revenue[taken],
            state_features(log, taken),
            users=log.user_index[taken],
            propensities=None if log.propensity is None else log.propensity[taken],
        )
        result["confounding"] = {"amount": found.amount, "revenue": found.revenue, "weighted": found.weighted}
        if found.confounded:
            warnings.append(found.warning)
    grid = np.unique(log.incentives)
    if log.propensity is None:
        result["note"] = (
            "There are no off-policy estimates: the log has no propensities, without which what was paid cannot be "
            "weighed against what the policy would pay."
        )
    elif len(grid) > MOST_AMOUNTS:
        result["note"] = (
            f"There are no off-policy estimates: the log has {len(grid)} distinct amounts, more than {MOST_AMOUNTS}, "
            "so that few are ever the policy's own. Round the amounts and their propensities, then estimate with "
            "goal.evaluation.off_policy."
        )
    else:
        few = log.user_index[rows] % max(1, -(-len(rows) // MOST_ROWS)) == 0
        result["estimates"] = _estimates(log, rows[few], amounts[few], grid, warnings)
    return result


def _estimates(
    log: InteractionLog, rows: Integers, amounts: Floats, grid: Floats, warnings: list[str]
) -> list[dict[str, Any]]:
    target = np.eye(len(grid))[nearest(grid, amounts)]
    features = state_features(log, rows)
    known = ~np.isnan(features)
    means = np.where(known, features, 0.0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)
    features = np.where(known, features, means)
    found = []
    for horizon in HORIZONS:
        decisions = LoggedDecisions.from_log(log, target, amounts=grid, rows=rows, horizon=horizon, features=features)
        # Cells of many features would hold a decision each: marginalised ratios see the log's own features, halved.
        coarse = LoggedDecisions.from_log(log, target, amounts=grid, rows=rows, horizon=horizon)
        answers = [
            self_normalized_importance_sampling(decisions),
            marginalized_importance_sampling(coarse, bins=2),
            fitted_q_evaluation(decisions),
        ]
        if decisions.clusters >= 5:
            answers.insert(1, doubly_robust(decisions))
        found += [_row(answer, horizon) for answer in answers]
        if horizon == 1:
            warnings += support(decisions).warnings
    return found


def _row(answer: OffPolicyEstimates, horizon: int) -> dict[str, Any]:
    def bounds(estimate: Estimate) -> list[float | None]:
        interval = estimate.interval or (None, None)
        return [side if side is not None and np.isfinite(side) else None for side in interval]

    return {
        "estimator": answer.estimator.replace("_", " "),
        "horizon": horizon,
        "effective_size": answer.effective_sample_size,
        "confidence": answer.confidence,
        "reason": answer.reason or None,
        **{name: getattr(answer, name).value for name in ("revenue", "cost", "roi")},
        **{f"{name}_interval": bounds(getattr(answer, name)) for name in ("revenue", "cost", "roi")},
    }
