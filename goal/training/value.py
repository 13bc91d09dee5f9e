"""Training of the long-horizon value where the past is used: fitted Q iteration on the training rows of the log.

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
from goal.log import InteractionLog
from goal.reward import LongHorizonValue, RewardModel
from goal.training.transitions import Transitions


class ValueStage:
    """Fitted Q iteration over every multiplier at once; where the past is left out, `goal.training.planning` plans.

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
        self.transitions = Transitions(reward, log, rows)
        self._set_scales()
        self.rate = min(1.0, config.travel / config.value.steps)
        """Polyak rate of the target networks."""
        targets = copy.deepcopy(reward.values).requires_grad_(False)
        self.targets = cast(list[LongHorizonValue], list(targets))
        self.module = nn.ModuleDict({"online": reward.values, "target": targets})

    @torch.no_grad()
    def _set_scales(self) -> None:
        reward = self.reward
        # At random: every so many rows could be the same step of every episode.
        generator = torch.Generator().manual_seed(0)
        sample = self.transitions.states(torch.randint(len(self.transitions), (10_000,), generator=generator))
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
        device = reward.grid.device
        indices = self.transitions.draw(size, generator)
        clock = next_clock = None
        going_on = self.transitions.going_on[indices]
        if reward.clock is not None and self.horizon is not None:
            step = torch.randint(self.horizon, (size,), generator=generator)
            clock = (step / self.horizon).to(device)
            next_clock = ((step + 1) / self.horizon).to(device)
            going_on = (step + 1 < self.horizon).to(torch.float32)
        states = self.transitions.states(indices)
        amounts, next_states = self._step(indices, states, generator)
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

    @torch.no_grad()
    def _step(
        self, indices: torch.Tensor, states: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Amounts `(B,)` and the next states `(B, S)` they lead to, as logged or at another amount of the grid."""
        transitions, pscore, device = self.transitions, self.reward.pscore, self.reward.grid.device
        rows = transitions.rows[indices.numpy()]
        amounts = torch.from_numpy(transitions.log.incentives[rows]).to(torch.float32)
        others = self.reward.grid.cpu()[torch.randint(len(self.reward.grid), amounts.shape, generator=generator)]
        moved = torch.rand(amounts.shape, generator=generator) < self.config.counterfactual
        amounts = torch.where(moved, others, amounts)
        bins = pscore.draw(states, amounts.to(device), generator)
        drawn = transitions.outcomes(bins, torch.rand(len(bins), generator=generator))
        outcomes = torch.where(moved[:, None], drawn, torch.from_numpy(transitions.log.outcomes[rows]))
        return amounts.to(device), transitions.after(indices, amounts, outcomes)

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
