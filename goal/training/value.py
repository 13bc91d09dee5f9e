"""Training of the long-horizon value: utility-to-go by fitted Q iteration on the training rows of the log.

No simulator is asked.

Shapes: B decisions, G amounts of the grid, n multipliers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import cast

import numpy as np
import torch
from torch import nn

from goal.config import RewardConfig
from goal.errors import ConfigurationError
from goal.log import InteractionLog, Windows
from goal.reward import LongHorizonValue, RewardModel
from goal.training.effects import AmountEffects
from goal.training.pscore import carried_by

SLOWING = 0.7
"""Share of the steps over which the target networks slow down, where the past is not used."""


def balance(log: InteractionLog, rows: np.ndarray, *, leave_out: int | None = None, cells: int = 20) -> np.ndarray:
    """Weights `(len(rows),)` for drawing decisions: one over the root of how many are alike, float64.

    Alike are those in one cell of numeric features and amount, each cut into ``cells`` equal parts of its range. A
    policy may live where the logged behaviour seldom goes; half-way between the log's own frequencies and a uniform
    cover, both are learned. With many features nearly every decision is alone, and all weigh the same.

    Args:
        log: the log.
        rows: the decisions.
        leave_out: numeric feature that plays no part.
        cells: parts of each range.
    """
    columns = [log.numeric[rows, k] for k in range(log.numeric.shape[1]) if k != leave_out]
    alike = np.zeros(len(rows), dtype=np.int64)
    for column in (*columns, log.incentives[rows]):
        low, high = np.nanquantile(column, [0.001, 0.999]) if np.isfinite(column).any() else (0.0, 0.0)
        place = (column - low) / max(high - low, 1e-12) * cells
        part = np.where(np.isnan(place), cells, np.clip(np.nan_to_num(place), 0, cells - 1)).astype(np.int64)
        alike = np.unique(alike * (cells + 1) + part, return_inverse=True)[1]
    return np.bincount(alike)[alike] ** -0.5


class ValueStage:
    """Fitted Q iteration over every multiplier at once.

    For a logged decision with next event s', the target of utility-to-go under multiplier lambda is
    max_a r(s', a) - lambda * c(s', a) + discount * utility-to-go(s', a), with r and c of the P-Score: the noise of a
    single response is averaged out once, there, and never enters the recursion. The greedy policy over amounts is what
    an exact SCPO update converges to, so this is its policy iteration without waiting for each policy.

    With a clock, each decision is moved to a random step of the episode and the last step ends it: dynamics do not
    depend on the clock (see `DecisionState`), so a state that the log meets only early also teaches what it is worth
    late. Rare decisions are drawn more often than they occur (see `balance`). With a horizon and no clock the logged
    end of an episode ends it. Without a horizon the log's last event of a user has no successor and is left out: the
    sum bootstraps.

    A share of the decisions is learned at another amount than the logged one: what comes in is then drawn from the
    P-Score, the past is carried on over that event (`DecisionState.after`) and the next features are moved by what
    amount and outcome do to them (see `AmountEffects`). A policy pays in states where the logged behaviour never did
    so, and a network alone would extrapolate there: a past in which the same amount was always paid tells that it will
    be paid again, and of no other.

    Args:
        reward: holds the frozen P-Score and the value networks to train.
        log: the log.
        rows: training rows, ascending.
        config: the settings.
        horizon: steps of an episode, or None.
    """

    name = "value"

    def __init__(
        self, reward: RewardModel, log: InteractionLog, rows: np.ndarray, config: RewardConfig, *, horizon: int | None
    ) -> None:
        self.reward = reward
        self.config = config
        self.horizon = horizon
        self.values = cast(list[LongHorizonValue], list(reward.values))
        reward.pscore.requires_grad_(False).eval()
        found = Windows(log, rows, length=1).successors()
        successors = found.index
        # With a clock the drawn step ends the episode; without one the logged end does.
        is_last = found.terminal & (reward.clock is None)
        keep = np.flatnonzero((successors >= 0) | is_last)
        if len(keep) == 0:
            raise ConfigurationError(
                "reward.horizon='long': no decision of the log is followed by another of its user; take 'immediate'"
            )
        self.going_on = torch.from_numpy(~is_last[keep]).to(torch.float32)
        self.log, self.rows = log, rows[keep]
        self.carried = carried_by(reward.pscore, log, rows)[keep]
        self.cumulative = torch.from_numpy(balance(log, self.rows, leave_out=reward.clock)).cumsum(0)
        self.effects = AmountEffects(log, self.rows, found.row[keep])
        self._index_outcomes()
        self._set_scales()
        self.rate = self._rate(0.0)
        targets = copy.deepcopy(reward.values).requires_grad_(False)
        self.targets = cast(list[LongHorizonValue], list(targets))
        self.module = nn.ModuleDict({"online": reward.values, "target": targets})

    def _index_outcomes(self) -> None:
        """Sort the decisions by what came in: `by_revenue[first[k] : first[k + 1]]` brought revenue of the k-th bin."""
        revenue = torch.from_numpy(self.log.outcomes[self.rows, 0])
        self.by_revenue = revenue.argsort(stable=True)
        bins = self.reward.pscore.bin_of(revenue[self.by_revenue])
        self.first = torch.searchsorted(bins, torch.arange(int(bins[-1]) + 2))

    @torch.no_grad()
    def _set_scales(self) -> None:
        reward = self.reward
        sample = self._states(torch.arange(0, len(self.rows), max(1, len(self.rows) // 10_000)))
        revenue, cost = reward.immediate(sample)
        if reward.clock is not None and self.horizon is not None:
            reward.baseline.copy_(revenue[:, 0].mean())
        best = (revenue[..., None] - reward.multipliers * cost[..., None]).amax(dim=1) - reward.baseline
        # Lower, and multipliers under which little is to be gained would take over.
        least = 0.2 * revenue.std().clamp(min=1e-6)
        steps = 1 / (1 - self.config.discount)
        steps = 0.5 * (steps if self.horizon is None else min(steps, self.horizon))
        for value in self.values:
            value.scale.copy_(best.abs().mean(dim=0).clamp(min=least) * steps)
            value.cost_scale.copy_(cost.amax(dim=1).mean().clamp(min=1e-6) * steps)

    def _rate(self, progress: float) -> float:
        """Polyak rate of the target networks."""
        config = self.config
        if self.reward.pscore.state.uses_history:
            return min(1.0, config.travel / config.value.steps)
        start, end = config.target_rate_start, config.target_rate
        return start * (end / start) ** min(1.0, progress / SLOWING)

    @torch.no_grad()
    def after_step(self) -> None:
        """Move the target networks (Polyak averaging)."""
        for target, value in zip(self.targets, self.values, strict=True):
            for kept, new in zip(target.parameters(), value.parameters(), strict=True):
                kept.lerp_(new, self.rate)

    @torch.no_grad()
    def finish(self) -> None:
        """Keep the averaged weights: near-equal amounts trade places from step to step, the average does not."""
        self.reward.values.load_state_dict(self.averaged)

    @property
    def averaged(self) -> dict[str, torch.Tensor]:
        """The averaged weights as they are now, of the shape of `RewardModel.values`."""
        return self.module["target"].state_dict()

    def losses(
        self, generator: torch.Generator, progress: float
    ) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        """One batch for all value networks, one loss."""
        size, reward = self.config.value.batch_size, self.reward
        self.rate = self._rate(progress)
        device = reward.grid.device
        place = torch.rand(size, generator=generator, dtype=torch.float64) * self.cumulative[-1]
        indices = torch.searchsorted(self.cumulative, place).clamp(max=len(self.rows) - 1)
        clock = next_clock = None
        going_on = self.going_on[indices]
        if reward.clock is not None and self.horizon is not None:
            step = torch.randint(self.horizon, (size,), generator=generator)
            clock = (step / self.horizon).to(device)
            next_clock = ((step + 1) / self.horizon).to(device)
            going_on = (step + 1 < self.horizon).to(torch.float32)
        states = self._states(indices)
        amounts, next_states = self._transitions(indices, states, generator)
        amounts = amounts[:, None]
        targets = self.target(next_states, next_clock, going_on.to(device))
        baseline = reward.baseline_to_go(clock)[..., 0]
        loss = torch.zeros((), device=device)
        for value, (utility, cost) in zip(self.values, targets, strict=True):
            utility_to_go, cost_to_go = value(states, clock, amounts)
            utility_error = (utility_to_go[:, 0] - (utility - baseline) / value.scale).square().mean()
            cost_error = (cost_to_go[:, 0] - cost / value.cost_scale).square().mean()
            # The cost's head learns alone and, by Adam, at any scale: a small one keeps it out of the clipping.
            loss = loss + 1000 * utility_error + cost_error
        utility, cost = targets[0]
        metrics = {"utility_to_go": utility[:, 0].mean(), "utility_to_go_strict": utility[:, -1].mean()}
        yield loss, {**metrics, "cost_to_go": cost[:, 0].mean()}

    def _found(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What decisions find: of their past `(B, M)`, and their numeric `(B, F)` and categorical `(B, C)` features."""
        rows, device = self.rows[indices.numpy()], self.reward.grid.device
        numeric, categorical = torch.from_numpy(self.log.numeric[rows]), torch.from_numpy(self.log.categorical[rows])
        return self.carried[indices].float().to(device), numeric.to(device), categorical.to(device)

    @torch.no_grad()
    def _states(self, indices: torch.Tensor) -> torch.Tensor:
        """States `(B, S)` of decisions."""
        return self.reward.pscore.state.of(*self._found(indices))

    @torch.no_grad()
    def _transitions(
        self, indices: torch.Tensor, states: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Amounts `(B,)` and the next states `(B, S)` they lead to, as logged or at another amount of the grid."""
        pscore, device, rows = self.reward.pscore, self.reward.grid.device, self.rows[indices.numpy()]
        amounts = torch.from_numpy(self.log.incentives[rows]).to(torch.float32)
        others = self.reward.grid.cpu()[torch.randint(len(self.reward.grid), amounts.shape, generator=generator)]
        moved = torch.rand(amounts.shape, generator=generator) < self.config.counterfactual
        amounts = torch.where(moved, others, amounts)
        drawn = self._outcomes(pscore.draw(states, amounts.to(device), generator), generator)
        outcomes = torch.where(moved[:, None], drawn, torch.from_numpy(self.log.outcomes[rows]))
        following = (part.to(device) for part in self.effects.next_features(indices, amounts, outcomes))
        amounts = amounts.to(device)
        carried = pscore.state.after(*self._found(indices), amounts, outcomes.to(device))
        return amounts, pscore.state.of(carried, *following)

    def _outcomes(self, bins: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Outcomes `(B, O)` of logged decisions, each at random among those whose revenue fell in the same bin."""
        bins = bins.clamp(max=len(self.first) - 2)
        count = self.first[bins + 1] - self.first[bins]
        place = self.first[bins] + (torch.rand(len(bins), generator=generator) * count).long()
        chosen = self.by_revenue[place.clamp(max=len(self.rows) - 1)]
        return torch.from_numpy(self.log.outcomes[self.rows[chosen.numpy()]])

    @torch.no_grad()
    def target(
        self, states: torch.Tensor, clock: torch.Tensor | None, going_on: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Utility and cost from the next event on under the greedy policy, each `(B, n)` in money, for each network.

        An amount is worth the least that any network gives it (Fujimoto et al., "Addressing function approximation
        error", 2018): the largest of noisy estimates is too large, the recursion would add that up, and where the log
        is thin the networks disagree most.
        """
        reward = self.reward
        revenue, cost = reward.immediate(states)
        immediate = revenue[..., None] - reward.multipliers * cost[..., None]
        immediate = immediate + reward.discount * reward.baseline_to_go(clock)
        utilities, costs = [], []
        for target in self.targets:
            utility, later_cost = target(states, clock, reward.grid)
            utilities.append(immediate + reward.discount * target.scale * utility)
            costs.append(cost[..., None] + reward.discount * target.cost_scale * later_cost)
        lowest = torch.stack(utilities).amin(dim=0)
        at = lowest.max(dim=1, keepdim=True).indices
        best = lowest.gather(1, at)[:, 0] * going_on[:, None]
        return [(best, cost.gather(1, at)[:, 0] * going_on[:, None]) for cost in costs]
