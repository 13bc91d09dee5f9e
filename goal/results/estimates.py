"""What amounts bring on a log without a simulator, by the reward model's word: the log does not say what would have
happened under other amounts.

Shapes: n windows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from goal.data import Data
from goal.log import Windows
from goal.model import Policy
from goal.reward import RewardModel

PerUser = tuple[np.ndarray, np.ndarray]
"""Revenue and cost of each user, per interaction."""


@torch.no_grad()
def allocate(policy: Policy, windows: Windows, multiplier: float) -> np.ndarray:
    """Amounts `(n,)` that the policy pays at each window."""
    device = policy.token_weights.device
    amounts = []
    for indices in windows.parts():
        history = windows.batch(indices).to(device)
        amounts.append(policy.allocate(history, torch.full((len(history),), multiplier, device=device)).cpu())
    return torch.cat(amounts).numpy()


@torch.no_grad()
def predict(reward: RewardModel, windows: Windows, amounts: np.ndarray) -> PerUser:
    """Revenue and cost `(n,)` that the reward model expects at each window for the amounts `(n,)`."""
    revenue, cost = [], []
    for indices in windows.parts():
        history = windows.batch(indices).to(reward.grid.device)
        paid = torch.from_numpy(amounts[indices]).to(reward.grid.device, torch.float32)[:, None]
        expected = reward.immediate(reward.pscore.state.pending(history), paid)
        for column, part in zip((revenue, cost), expected, strict=True):
            column.append(part[:, 0].cpu())
    return torch.cat(revenue).double().numpy(), torch.cat(cost).double().numpy()


def unexplained(reward: RewardModel, windows: Windows) -> np.ndarray:
    """Revenue `(n,)` of each window beyond what the reward model expects of the logged amount.

    Added to what it expects of another amount it gives an estimate whose mean is right where the policy pays as the log
    did, and that scatters as outcomes do: bounds over users and windows of a stream would otherwise be too narrow.
    """
    return windows.log.revenue[windows.rows] - predict(reward, windows, windows.log.incentives[windows.rows])[0]


def estimated_per_user(
    reward: RewardModel, policy: Policy, data: Data
) -> tuple[Callable[[float], PerUser], np.ndarray]:
    """What calibration needs from the log alone: per-user revenue and cost, and revenue of never paying.

    Revenue is the reward model's expectation with what it left `unexplained` of the same interaction, cost its
    expectation. That the policy's amounts bring what the model expects of them is taken for granted.
    """
    windows = data.windows(data.splits.calibration, max(policy.config.window, reward.window))
    users, index = np.unique(data.log.user_index[windows.rows], return_inverse=True)
    interactions, beyond = len(windows) / len(users), unexplained(reward, windows)

    def by_user(values: np.ndarray) -> np.ndarray:
        # Over the mean number of interactions, so that the mean over users is per interaction.
        return np.bincount(index, weights=values, minlength=len(users)) / interactions

    def evaluate(multiplier: float) -> PerUser:
        revenue, cost = predict(reward, windows, allocate(policy, windows, multiplier))
        return by_user(revenue + beyond), by_user(cost)

    never = predict(reward, windows, np.zeros(len(windows)))[0]
    return evaluate, by_user(never + beyond)
