"""R and C of Eq. of r_lambda: what a payment brings and costs, now and later, as tables over a grid of amounts.

Shapes: S states, G amounts of the grid, n multipliers, m candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from goal.log import History
from goal.reward.planned import PlannedValue
from goal.reward.pscore import COST, PScore
from goal.reward.value import LongHorizonValue


class Reward(NamedTuple):
    """R and C of amounts, each `(S, n, m)`, in money."""

    reward: torch.Tensor
    cost: torch.Tensor


class RewardTable(NamedTuple):
    """R and C at every amount of the grid, in money."""

    reward: torch.Tensor
    """`(S, G, n)`."""
    cost: torch.Tensor
    """`(S, G, n)`."""
    unit_cost: torch.Tensor
    """`(S, 1, 1)` present cost of a unit of incentive, at the largest amount of the grid."""


class RewardModel(nn.Module):
    """P-Score and long-horizon value as one reward (docs/decisions.md 2).

    R = revenue + discount * revenue-to-go (+ fusion_weight * fused objectives), C = cost + discount * cost-to-go.

    Args:
        pscore: the P-Score.
        values: value networks, of whose utilities the least is used; empty where values are planned, and for the
            immediate horizon.
        planned: planned values, or None.
        grid: `(G,)` amounts at which values are compared, ascending.
        multipliers: `(n,)` candidate set.
        discount: of later money.
        cost_rate: cost of one unit of incentive; None takes the P-Score's cost tower.
        fusion_weight: weight of the fused objectives in R.
        clock: index of the numeric feature that is the share of the episode that has passed, or None.
    """

    grid: torch.Tensor
    multipliers: torch.Tensor
    baseline: torch.Tensor
    """Revenue of a step without payment: what the value networks learn is beyond it (with a clock; else 0)."""

    def __init__(
        self,
        pscore: PScore,
        values: list[LongHorizonValue],
        *,
        planned: PlannedValue | None = None,
        grid: torch.Tensor,
        multipliers: torch.Tensor,
        discount: float,
        cost_rate: float | None,
        fusion_weight: float = 0.0,
        clock: int | None = None,
    ) -> None:
        super().__init__()
        self.pscore = pscore
        self.values = nn.ModuleList(values)
        self.planned = planned
        self.horizon = values[0].horizon if values else None
        self.register_buffer("grid", grid.to(torch.float32), persistent=False)
        self.register_buffer("multipliers", multipliers.to(torch.float32), persistent=False)
        self.register_buffer("baseline", torch.zeros(()))
        self.discount = discount
        self.cost_rate = cost_rate
        self.fusion_weight = fusion_weight
        self.clock = clock

    @property
    def window(self) -> int:
        """Events that a window should hold, the pending one included; 1 where the past is not used."""
        return self.pscore.state.window if self.pscore.state.uses_history else 1

    @property
    def looks_ahead(self) -> bool:
        """Whether R and C hold more than the present decision."""
        return self.planned is not None or len(self.values) > 0

    def immediate(self, states: torch.Tensor, amounts: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Expected revenue and cost of the present decision, each `(S, G)`, at amounts `(S, G)` or else the grid's."""
        amounts = self.grid if amounts is None else amounts
        revenue = self.pscore.expected(states, amounts)
        if self.cost_rate is None:
            return revenue, self.pscore.expected(states, amounts, COST)
        return revenue, (self.cost_rate * amounts).expand_as(revenue)

    def to_go(self, states: torch.Tensor, clock: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Utility-to-go and cost-to-go, each `(S, G, n)`, in money: planned, or the networks' least and their mean."""
        if self.planned is not None:
            return self.planned(states, clock)
        outputs = [value(states, clock, self.grid) for value in self.values]
        utility = torch.stack([u * value.scale for (u, _), value in zip(outputs, self.values, strict=True)]).amin(0)
        utility = utility + self.baseline_to_go(clock)
        cost = torch.stack([c * value.cost_scale for (_, c), value in zip(outputs, self.values, strict=True)]).mean(0)
        return utility, cost

    def baseline_to_go(self, clock: torch.Tensor | None) -> torch.Tensor:
        """Discounted sum `(S, 1, 1)` of the baseline over the steps that follow, in money; 0 without a clock."""
        if clock is None or self.horizon is None:
            return self.baseline.new_zeros(1, 1, 1)
        left = ((1 - clock) * self.horizon - 1).clamp(min=0)
        return (self.baseline * (1 - self.discount**left) / (1 - self.discount))[:, None, None]

    def clock_of(self, history: History) -> torch.Tensor | None:
        """Share of the episode that has passed at the pending events, `(S,)`."""
        if self.clock is None:
            return None
        last = (history.lengths - 1)[:, None]
        return history.numeric[..., self.clock].gather(1, last)[:, 0]

    @torch.no_grad()
    def tabulate(self, history: History) -> RewardTable:
        """R and C of S states at every amount of the grid under every multiplier."""
        states = self.pscore.state.pending(history)
        return self.table(states, self.clock_of(history))

    def table(self, states: torch.Tensor, clock: torch.Tensor | None) -> RewardTable:
        """`tabulate` from states `(S, size)` that are at hand."""
        revenue, cost = self.immediate(states)
        reward = revenue
        if self.fusion_weight:
            reward = reward + self.fusion_weight * self.pscore.fused(states, self.grid)
        unit_cost = cost[:, -1:, None] / self.grid[-1]
        shape = (*revenue.shape, len(self.multipliers))
        reward, cost = reward[..., None].expand(shape), cost[..., None].expand(shape)
        if self.looks_ahead:
            utility, later_cost = self.to_go(states, clock)
            # Utility-to-go is revenue-to-go - multiplier * cost-to-go, so their sum below is revenue-to-go.
            reward = reward + self.discount * (utility + self.multipliers * later_cost)
            cost = cost + self.discount * later_cost
        return RewardTable(reward, cost, unit_cost)

    def at(self, table: RewardTable, amounts: torch.Tensor) -> Reward:
        """Read a table at amounts `(S, n, m)`, linearly between the grid's; each result is `(S, n, m)`.

        An amount beyond the grid, of which the log says little, brings what the grid's last one brings, and each unit
        more costs what a unit of that one does.
        """
        amounts = amounts.to(self.grid.dtype)
        right = torch.searchsorted(self.grid, amounts.contiguous()).clamp(1, len(self.grid) - 1)
        low, high = self.grid[right - 1], self.grid[right]
        share = ((amounts - low) / (high - low)).clamp(0, 1)
        values = []
        for entries in (table.reward, table.cost):
            by_multiplier = entries.transpose(1, 2)
            left_value, right_value = by_multiplier.gather(2, right - 1), by_multiplier.gather(2, right)
            values.append(torch.lerp(left_value, right_value, share))
        reward, cost = values
        return Reward(reward, cost + table.unit_cost * (amounts - self.grid[-1]).clamp(min=0))
