"""What a finished policy is worth: calibration, evaluation and report of a run.

In the simulator a policy is rolled out. On a log without one it is estimated by the reward model and marked so: the log
does not say what would have happened under other amounts.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from goal.data import Data, Stream, seed_of
from goal.evaluation import (
    Constant,
    amount_distribution,
    behaviour_points,
    constant_points,
    expert_usage,
    ledger,
    metrics,
    of_first_users,
    oracle_frontier,
    oracle_violation_rate,
    promises,
    report,
    rollout,
    sweep,
)
from goal.evaluation.held_out import amount_accuracy
from goal.evaluation.off_policy import log_evidence
from goal.files import write_atomically
from goal.log import Windows
from goal.model import Policy
from goal.serialization import to_dict
from goal.simulator import Parameters
from goal.simulator.oracle import best_revenue
from goal.training.metrics import explain

if TYPE_CHECKING:
    from goal.pipeline import Run

PerUser = tuple[np.ndarray, np.ndarray]
BATCH = 2048
FEW_USERS = 500
"""Users, at most, on which what takes long is set side by side: frontiers, and the policy against its own value."""


def simulated_per_user(
    policy: Policy, parameters: Parameters, *, users: int, seed: int
) -> tuple[Callable[[float], PerUser], np.ndarray]:
    """What calibration needs from the simulator: mean revenue and cost per step of each user, and of never paying."""

    def evaluate(multiplier: float) -> PerUser:
        return rollout(policy, parameters, multiplier, users=users, seed=seed).per_user()

    return evaluate, rollout(Constant(0.0), parameters, 0.0, users=users, seed=seed).per_user()[0]


@torch.no_grad()
def allocate(policy: Policy, windows: Windows, multiplier: float) -> np.ndarray:
    """Amounts `(n,)` that the policy pays at each window."""
    device = policy.token_weights.device
    amounts = []
    for indices in np.array_split(np.arange(len(windows)), max(1, -(-len(windows) // BATCH))):
        history = windows.batch(indices).to(device)
        amounts.append(policy.allocate(history, torch.full((len(history),), multiplier, device=device)).cpu())
    return torch.cat(amounts).numpy()


@torch.no_grad()
def predict(run: Run, windows: Windows, amounts: np.ndarray) -> PerUser:
    """Revenue and cost `(n,)` that the reward model expects at each window for the amounts `(n,)`."""
    reward = run.reward
    revenue, cost = [], []
    for indices in np.array_split(np.arange(len(windows)), max(1, -(-len(windows) // BATCH))):
        history = windows.batch(indices).to(run.device)
        paid = torch.from_numpy(amounts[indices]).to(run.device, torch.float32)[:, None]
        expected = reward.immediate(reward.pscore.state.pending(history), paid)
        for column, part in zip((revenue, cost), expected, strict=True):
            column.append(part[:, 0].cpu())
    return torch.cat(revenue).double().numpy(), torch.cat(cost).double().numpy()


def unexplained(run: Run, windows: Windows) -> np.ndarray:
    """Revenue `(n,)` of each window beyond what the reward model expects of the logged amount.

    Added to what it expects of another amount it gives an estimate whose mean is right where the policy pays as the log
    did, and that scatters as outcomes do: bounds over users and windows of a stream would otherwise be too narrow.
    """
    return windows.log.revenue[windows.rows] - predict(run, windows, windows.log.incentives[windows.rows])[0]


def estimated_per_user(run: Run, policy: Policy) -> tuple[Callable[[float], PerUser], np.ndarray]:
    """What calibration needs from the log alone: per-user revenue and cost, and revenue of never paying.

    Revenue is the reward model's expectation with what it left `unexplained` of the same interaction, cost its
    expectation. That the policy's amounts bring what the model expects of them is taken for granted.
    """
    data = run.data
    windows = data.windows(data.splits.calibration, max(policy.config.window, run.reward.window))
    users, index = np.unique(data.log.user_index[windows.rows], return_inverse=True)
    interactions, beyond = len(windows) / len(users), unexplained(run, windows)

    def by_user(values: np.ndarray) -> np.ndarray:
        # Over the mean number of interactions, so that the mean over users is per interaction.
        return np.bincount(index, weights=values, minlength=len(users)) / interactions

    def evaluate(multiplier: float) -> PerUser:
        revenue, cost = predict(run, windows, allocate(policy, windows, multiplier))
        return by_user(revenue + beyond), by_user(cost)

    never = predict(run, windows, np.zeros(len(windows)))[0]
    return evaluate, by_user(never + beyond)


def evaluate(run: Run, policy: Policy) -> dict[str, Any]:
    """The artefacts that come from evaluation: headline, sweep and what belongs to them."""
    if run.data.parameters is None:
        return _evaluate_log(run, policy)
    return _evaluate_simulated(run, policy, run.data.parameters)


def sweep_multipliers(run: Run) -> list[float]:
    """The candidates up to the ROI target."""
    return [multiplier for multiplier in run.multipliers if multiplier <= run.config.roi_target]


def _evaluate_simulated(run: Run, policy: Policy, parameters: Parameters) -> dict[str, Any]:
    config = run.config
    settings = config.evaluation
    users = settings.users or (2000 if parameters.users_alike else 1000)
    seed, interactions = seed_of(config.seed, Stream.TEST), users * parameters.horizon
    multipliers = sweep_multipliers(run)
    common = {
        "users": users, "seed": seed, "roi_target": config.roi_target,
        "window": settings.window(interactions), "stride": settings.stride(interactions),
    }  # fmt: skip
    swept = sweep(policy, parameters, multipliers, **common)
    calibration = run.read("calibration.json")
    chosen = sweep(policy, parameters, [calibration["multiplier"]], **common, oracle=False)
    row = chosen.rows[0]
    # The bound is on the average ROI, and holds where all users are alike.
    bounded = config.constraint.roi == "average" and parameters.users_alike
    best = best_revenue(parameters, config.roi_target) if bounded else None
    headline = {
        **_headline(run, row, calibration, interactions),
        "users": users,
        "never_pay_rev": chosen.never_pay_rev,
    }
    if best is not None:
        headline |= {"best_rev": best[1], "share_of_best": row["rev"] / best[1] if row["rev"] is not None else None}
    if parameters.users_alike and row["roi"] is not None:
        headline["oracle_rvr"] = oracle_violation_rate(
            parameters, row["roi"], target=config.roi_target,
            **{name: common[name] for name in ("users", "seed", "window", "stride")},
        )  # fmt: skip
    few = {"users": min(users, FEW_USERS), "seed": seed}
    compared = of_first_users(
        swept, parameters, few["users"], seed=seed, roi_target=config.roi_target, window=few["users"]
    )
    seen = None if run.reward.window > 1 else 1
    return {
        "headline": headline,
        "sweep": list(swept.rows),
        "frontier": {
            "oracle": oracle_frontier(parameters, multipliers, users=users, seed=seed),
            "behaviour": behaviour_points(parameters, **few),
            "constants": constant_points(parameters, **few),
        },
        "amounts": amount_distribution(swept.rollouts, parameters.levels),
        "experts": _experts(run, policy, multipliers),
        "diagnostics": {
            "reward_calibration": _reward_calibration(run),
            "ledger": ledger(run.reward, parameters, compared.rows, window=seen, **few),
            "planned": run.reward.planned is not None,
            "promises": promises(
                run.values_in_the_making(),
                parameters,
                multipliers[:: max(1, (len(multipliers) - 1) // 2)],
                window=seen,
                users=min(users, 200),
                seed=seed,
            ),
        },
    }


def _evaluate_log(run: Run, policy: Policy) -> dict[str, Any]:
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
    calibration = run.read("calibration.json")
    beyond = unexplained(run, windows)
    never, rows = predict(run, windows, np.zeros(len(windows)))[0] + beyond, []
    for multiplier in [*sweep_multipliers(run), calibration["multiplier"]]:
        expected, expected_cost = predict(run, windows, allocate(policy, windows, multiplier))
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
    window_roi = metrics.window_roi(revenue, cost, window=logged["window"], stride=logged["stride"]).tolist()
    window_roi = [value if math.isfinite(value) else None for value in window_roi]  # JSON has no infinity
    return {
        "headline": {
            **_headline(run, row, calibration, interactions),
            "estimate": True,
            "never_pay_rev": float(never.mean()),
        },
        "sweep": swept,
        "experts": _experts(run, policy, sweep_multipliers(run)),
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
            "off_policy": log_evidence(log, windows.rows, allocate(policy, windows, row["multiplier"])),
        },
        "diagnostics": {"reward_calibration": _reward_calibration(run)},
    }  # fmt: skip


def _headline(run: Run, row: dict[str, Any], calibration: dict[str, Any], interactions: int) -> dict[str, Any]:
    intervals, kind = calibration["intervals"], run.config.constraint.roi
    return {
        "roi_target": run.config.roi_target,
        "feasible": calibration["feasible"],
        "message": calibration["message"],
        "confidence": calibration["confidence"],
        "roi_kind": kind,
        ("roi_interval" if kind == "average" else "incremental_roi_interval"): intervals.get("roi"),
        "rev_interval": intervals.get("revenue"),
        "cost_interval": intervals.get("cost"),
        **{name: row[name] for name in ("multiplier", "roi", "rev", "cost", "rvr", "incremental_roi")},
        "window": run.config.evaluation.window(interactions),
        "stride": run.config.evaluation.stride(interactions),
    }


@torch.no_grad()
def _experts(run: Run, policy: Policy, multipliers: list[float]) -> dict[str, Any]:
    """Routing probabilities at the first token on a sample of training states."""
    rows = run.data.splits.training
    windows = run.data.windows(rows[:: max(1, len(rows) // 1024)], policy.config.window)
    history = windows.batch(np.arange(len(windows))).to(run.device)
    usage = [
        policy.expert_usage(history, torch.full((len(history),), multiplier, device=run.device))
        .mean(dim=0)
        .cpu()
        .numpy()
        for multiplier in multipliers
    ]
    return expert_usage(np.stack(usage), np.array(multipliers)).to_dict()


@torch.no_grad()
def _reward_calibration(run: Run, *, bins: int = 10) -> list[dict[str, Any]]:
    """Predicted against observed means by decile of the prediction, on calibration rows where there are any."""
    data: Data = run.data
    rows = data.splits.calibration if len(data.splits.calibration) else data.splits.training
    rows = rows[:: max(1, len(rows) // 20_000)]
    windows = data.windows(rows, run.reward.window)
    predicted, _ = predict(run, windows, data.log.incentives[rows])
    observed = data.log.revenue[rows]
    groups = np.array_split(np.argsort(predicted, kind="stable"), min(bins, len(rows)))
    return [
        {
            "objective": "revenue",
            "predicted": [float(predicted[group].mean()) for group in groups],
            "observed": [float(observed[group].mean()) for group in groups],
            "count": [len(group) for group in groups],
        }
    ]


def versions() -> dict[str, str]:
    """Versions of what the result depends on."""
    names = ("goal-incentives", "torch", "numpy", "pyarrow")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def _metric_help(lines: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Sentences of the metrics that occur, by stage and name."""
    found: dict[str, dict[str, str]] = {}
    for stage, name in {(line["stage"], name): None for line in lines for name in line}:
        if (sentence := explain(stage, name)) is not None:
            found.setdefault(stage, {})[name] = sentence
    return found


def write_report(run: Run) -> None:
    """Write summary.json, plots/*.png and report.html from what the earlier stages left."""
    evaluation = run.read("evaluation.json")
    headline = evaluation["headline"]
    wall_seconds = round(sum(run.seconds.values()), 1)
    source = f"log {run.config.log}" if run.config.log else f"environment {run.config.environment}"
    fields = ("multiplier", "rev", "cost", "roi", "rvr", "value", "oracle_value", "reference_value")
    summary = {
        **{name: headline[name] for name in ("roi_target", "multiplier", "rev", "cost", "roi", "rvr")},
        "feasible": headline["feasible"],
        "estimate": headline.get("estimate", False),
        "sweep": [{name: row[name] for name in fields} for row in evaluation["sweep"]],
        "wall_seconds": wall_seconds,
        "device": str(run.device),
        "versions": versions(),
    }
    schema = run.data.schema
    statistics = run.tokenizer.statistics
    assert statistics is not None  # the vocabulary stage fitted it
    artefacts = {
        "run": {
            "source": source,
            "seed": run.config.seed,
            "effort": run.config.effort,
            "device": str(run.device),
            "wall_seconds": wall_seconds,
            "versions": versions(),
            "currency": schema.currency,
            "incentive_unit": schema.incentive_unit,
        },
        "settings": {**to_dict(run.config), "found_on_the_log": run.read("reward/config.json")},
        "calibration": run.read("calibration.json"),
        "metrics": (lines := run.metrics.read()),
        "metric_help": _metric_help(lines),
        "tokenizer": {
            "size": statistics.size,
            "max_length": statistics.worst_length,
            "mean_length": statistics.mean_length,
            "worst_relative_error": statistics.worst_relative_error,
            "values": run.tokenizer.values.tolist(),
            "lengths": [count / statistics.amounts for count in statistics.length_counts],
        },
        **evaluation,
    }
    report.build(artefacts, run.folder)
    write_atomically(run.folder / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())
