"""Where value is lost in a simulated environment: in what was learned of the future, or in the policy made from it.

Shapes: B windows, G amounts of the grid, n candidates.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from types import SimpleNamespace

import numpy as np
import torch

from goal.evaluation import metrics
from goal.evaluation.rollout import Rollout, expected_revenue, rollout_many
from goal.evaluation.sweep import Sweep
from goal.log import History
from goal.reward import RewardModel, RewardTable
from goal.simulator import Parameters


class ValueGreedy:
    """Pays what the reward model values most under the candidate nearest to the multiplier: SCPO's limit, unwritten.

    Args:
        reward: a trained reward model.
        window: events to see, the pending one included; None carries the whole past along from step to step, and the
            object then serves one `rollout_many`, which asks for the same users in the same order at every step.
    """

    def __init__(self, reward: RewardModel, *, window: int | None) -> None:
        self.reward = reward
        self.config = SimpleNamespace(window=window or 2)
        self._carried: deque[torch.Tensor] | None = deque() if window is None else None
        self.expected: dict[float, float] = {}
        """Mean utility-to-go, discounted, that was expected of the first decisions met at each multiplier."""

    @torch.no_grad()
    def allocate(self, history: History, multiplier: torch.Tensor) -> torch.Tensor:
        """See `Allocator`."""
        reward = self.reward
        history, multiplier = history.to(reward.grid.device), multiplier.to(reward.grid.device)
        table = self._table(history)
        utility = table.reward - reward.multipliers * table.cost
        nearest = (multiplier[:, None] - reward.multipliers).abs().argmin(dim=1)
        best = utility.take_along_dim(nearest[:, None, None], dim=2)[..., 0].max(dim=1)
        for met in multiplier.unique().tolist():
            self.expected.setdefault(met, float(best.values[multiplier == met].double().mean()))
        return reward.grid[best.indices].double().cpu()

    def _table(self, history: History) -> RewardTable:
        if self._carried is None:
            return self.reward.tabulate(history)
        state = self.reward.pscore.state
        carried = state.carry(history)[:, 0]
        if history.window > 1:
            event = history.numeric[:, 0], history.categorical[:, 0], history.incentives[:, 0], history.outcomes[:, 0]
            carried = state.after(self._carried.popleft(), *event)
        self._carried.append(carried)
        states = state.of(carried, history.numeric[:, -1], history.categorical[:, -1])
        return self.reward.table(states, self.reward.clock_of(history))


def ledger(
    reward: RewardModel, parameters: Parameters, swept: Sweep, *, window: int | None, seed: int
) -> list[dict[str, float | None]]:
    """Roll the greedy policy of the learned value out and set it beside the policy and the oracle.

    Args:
        reward: a trained reward model.
        parameters: the environment.
        swept: of the policy over candidate multipliers, with its oracle; its users are met again.
        window: events that the greedy policy sees; None: the whole past.
        seed: of the users, as of `swept`.

    Returns:
        One row a multiplier: `expected_value`, what the reward model promises new users over an episode, discounted,
        and `realised_value`, what its greedy policy brought them, both in money an episode; `greedy_value` and
        `policy_value`, what was paid brings in expectation, money per interaction without discount, and `oracle_value`;
        and of the gain over the best constant amount, `greedy_share` and `policy_share`: what they differ by is what
        SCPO and generation add or lose (None where little is to be gained).

    Raises:
        ConfigurationError: as `rollout_many`.
    """
    greedy = ValueGreedy(reward, window=window)
    multipliers, users = [made.multiplier for made in swept.rollouts], len(swept.rollouts[0].revenue)
    rollouts = rollout_many(greedy, parameters, multipliers, users=users, seed=seed)
    entries = []
    for row, paid, made in zip(swept.rows, swept.rollouts, rollouts, strict=True):
        expected, realised = _promise(made, greedy)
        values = [_expected_value(each, parameters, seed=seed) for each in (made, paid)]
        oracle, reference = row["oracle_value"], row["reference_value"]
        shares: list[float | None] = [None, None]
        if oracle is not None and reference is not None and metrics.is_gain_large(oracle=oracle, reference=reference):
            shares = [metrics.share_of_gain(value, oracle=oracle, reference=reference) for value in values]
        entries.append(
            {
                "multiplier": made.multiplier,
                "expected_value": expected,
                "realised_value": realised,
                "greedy_value": values[0],
                "policy_value": values[1],
                "oracle_value": oracle,
                "greedy_share": shares[0],
                "policy_share": shares[1],
            }
        )
    return entries


def promises(
    models: Iterable[tuple[int, RewardModel]],
    parameters: Parameters,
    multipliers: Sequence[float],
    *,
    window: int | None,
    users: int,
    seed: int,
) -> list[dict[str, float]]:
    """What the value promised new users in the making, and what its greedy policy then brought them.

    Args:
        models: a reward model at points of the training, or of the planning, of its values, by step.
        parameters: the environment.
        multipliers: candidates to look at.
        window: events that the greedy policy sees; None: the whole past.
        users: how many users.
        seed: of the users.

    Returns:
        One row a step and multiplier: `step, multiplier, expected_value, realised_value`, the values in money an
        episode, discounted.

    Raises:
        ConfigurationError: as `rollout_many`.
    """
    rows = []
    for step, reward in models:
        greedy = ValueGreedy(reward, window=window)
        for made in rollout_many(greedy, parameters, multipliers, users=users, seed=seed):
            expected, realised = _promise(made, greedy)
            rows.append({"step": step, "multiplier": made.multiplier, "expected_value": expected,
                         "realised_value": realised})  # fmt: skip
    return rows


def _promise(made: Rollout, greedy: ValueGreedy) -> tuple[float, float]:
    """Expected and realised value of an episode, discounted."""
    discount = greedy.reward.discount if greedy.reward.looks_ahead else 0.0
    utility = (made.revenue - made.multiplier * made.cost).mean(axis=0)
    realised = float((utility * discount ** np.arange(len(utility))).sum())
    return greedy.expected[float(np.float32(made.multiplier))], realised


def _expected_value(made: Rollout, parameters: Parameters, *, seed: int) -> float:
    """Value per interaction of what was paid, without the luck of what came in."""
    return float(expected_revenue(made, parameters, seed=seed).mean()) - made.multiplier * float(made.cost.mean())
