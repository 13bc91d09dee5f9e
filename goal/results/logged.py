"""What a policy is worth on a log without a simulator, estimated by the reward model and marked so."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from goal.evaluation import amount_distribution, metrics
from goal.evaluation.held_out import amount_accuracy
from goal.evaluation.off_policy import log_evidence
from goal.log import thinned
from goal.model import Policy
from goal.results.estimates import allocate, predict, unexplained
from goal.results.parts import experts, headline_of, reward_calibration, sweep_multipliers
from goal.run_folder import read_calibration

if TYPE_CHECKING:
    from goal.pipeline import Run


MOST_CHECKED = 20_000
"""Events, at most, on which the reward model is held against what came in."""


def evaluate_log(run: Run, policy: Policy) -> dict[str, Any]:
    """The artefacts of the test split: headline, sweep and what the log itself says."""
    config, data = run.config, run.data
    log, settings = data.log, config.evaluation
    windows = data.windows(data.splits.test, max(policy.config.window, run.reward.window))
    # The stream of all users in time order; a user's own order breaks ties.
    order = np.argsort(log.time[windows.rows], kind="stable")
    revenue, cost = log.revenue[windows.rows][order], log.cost[windows.rows][order]
    interactions = len(windows)
    logged = {
        "target": config.roi_target,
        "window": settings.window(interactions),
        "stride": settings.stride(interactions),
    }
    calibration = read_calibration(run.folder)
    beyond = unexplained(run.reward, windows)
    never, rows = predict(run.reward, windows, np.zeros(len(windows)))[0] + beyond, []
    multipliers, shares, paid = sweep_multipliers(run), [], np.empty(0)
    # Amounts that are not listed lie between those of the grid.
    levels = data.allowed_amounts or np.union1d([0.0, run.tokenizer.min_unit], data.grid(config.reward.grid_size))
    for multiplier in [*multipliers, calibration["multiplier"]]:
        paid = allocate(policy, windows, multiplier)
        shares.append(amount_distribution({multiplier: paid}, levels))
        expected, expected_cost = predict(run.reward, windows, paid)
        brought = expected + beyond
        rev, spent = float(brought.mean()), float(expected_cost.mean())
        stream = brought[order], expected_cost[order]
        rows.append(
            {
                "multiplier": multiplier, "rev": rev, "cost": spent, "roi": rev / spent if spent > 0 else None,
                "rvr": metrics.roi_violation_rate(*stream, **logged), "value": rev - multiplier * spent,
                "oracle_value": None, "reference_value": None,
                "incremental_roi": (rev - float(never.mean())) / spent if spent > 0 else None,
            }
        )  # fmt: skip
    swept, row = rows[:-1], rows[-1]
    kept_back = data.windows(thinned(data.splits.calibration, MOST_CHECKED), run.reward.window)
    window_roi = metrics.window_roi(revenue, cost, window=logged["window"], stride=logged["stride"]).tolist()
    window_roi = [value if math.isfinite(value) else None for value in window_roi]  # JSON has no infinity
    return {
        "headline": {
            **headline_of(run, row, calibration, interactions),
            "estimate": True,
            "never_pay_rev": float(never.mean()),
        },
        "sweep": swept,
        "amounts": {**shares[0], "multipliers": multipliers, "share": [each["share"][0] for each in shares[:-1]]},
        "experts": experts(run, policy, multipliers),
        "log": {
            "name": str(config.log),
            "events": log.events,
            "users": log.users,
            "splits": {name: len(getattr(data.splits, name)) for name in ("training", "calibration", "test")},
            "accuracy": amount_accuracy(
                run.policy("pretrained"),
                log,
                training=data.splits.training,
                held_out=data.splits.test,
                multipliers=run.multipliers,
            ),
            "windows": {**logged, "roi": float(revenue.sum() / cost.sum()) if cost.sum() > 0 else None,
                        "rvr": metrics.roi_violation_rate(revenue, cost, **logged), "window_roi": window_roi},
            "estimate": [{name: row[name] for name in ("multiplier", "rev", "cost", "roi")} for row in swept],
            "randomised": log.propensity is not None,
            "off_policy": log_evidence(log, windows.rows, paid),
        },
        "diagnostics": {"reward_calibration": reward_calibration(run.reward, kept_back)},
    }  # fmt: skip
