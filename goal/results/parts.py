"""What the evaluations of simulated and of real logs have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from goal.evaluation import expert_usage
from goal.log import Windows, thinned
from goal.model import Policy
from goal.reward import RewardModel
from goal.training.pscore import labels_of

if TYPE_CHECKING:
    from goal.pipeline import Run


def sweep_multipliers(run: Run) -> list[float]:
    """The candidates up to the ROI target."""
    return [multiplier for multiplier in run.multipliers if multiplier <= run.config.roi_target]


def headline_of(run: Run, row: dict[str, Any], calibration: dict[str, Any], interactions: int) -> dict[str, Any]:
    """What is said first of the calibrated multiplier, from its row of a sweep over so many interactions."""
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
def experts(run: Run, policy: Policy, multipliers: list[float]) -> dict[str, Any]:
    """Routing probabilities at the first token on a sample of training states."""
    rows = run.data.splits.training
    windows = run.data.windows(thinned(rows, 1024), policy.config.window)
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
def reward_calibration(reward: RewardModel, windows: Windows, *, bins: int = 10) -> list[dict[str, Any]]:
    """Predicted against observed means by decile of the prediction, of every objective that the P-Score learns."""
    pscore, log, device = reward.pscore, windows.log, reward.grid.device
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in pscore.kinds}
    for indices in windows.parts():
        states = pscore.state.pending(windows.batch(indices).to(device))
        paid = torch.from_numpy(log.incentives[windows.rows[indices]]).to(device, torch.float32)[:, None]
        for name, values in parts.items():
            values.append(pscore.expected(states, paid, name)[:, 0].cpu())
    labels = labels_of(log, torch.from_numpy(windows.rows), pscore)
    rows = []
    for name, kind in pscore.kinds.items():
        predicted = torch.cat(parts[name]).double().numpy()
        observed = (labels[name] > 0 if kind == "binary" else labels[name]).double().numpy()
        groups = np.array_split(np.argsort(predicted, kind="stable"), min(bins, len(windows)))
        rows.append(
            {
                "objective": name,
                "predicted": [float(predicted[group].mean()) for group in groups],
                "observed": [float(observed[group].mean()) for group in groups],
                "count": [len(group) for group in groups],
            }
        )
    return rows
