"""What a payment does to everything that comes later: utility-to-go and cost-to-go under each multiplier.

Utility is revenue - multiplier * cost. It is learned as one quantity because it is smooth where its two parts are not:
when the best amount flips between two near-equals, revenue and cost jump but their Lagrangian does not (the envelope
theorem), so the errors of one refit do not feed the next. docs/decisions.md has the measurements.

Shapes: B decisions, G amounts of each, n multipliers.
"""

from __future__ import annotations

import torch
from torch import nn

from goal.log import FeatureScaling
from goal.model.embedding import AmountFeatures
from goal.reward.pscore import AmountTower

LAST_STEPS = (1, 4, 16)
"""Scales, in steps, on which the end of an episode is told near from far."""


class LongHorizonValue(nn.Module):
    """Discounted sums from the next event on, for every multiplier of the candidate set at once.

    What a state is worth is far larger than what an amount changes about it, so each has a network of its own and the
    second starts at zero (after Wang et al., "Dueling network architectures", 2016).

    Args:
        state_size: width of a decision's state.
        scaling: measured on the training rows.
        multipliers: the candidate set, ascending.
        hidden: width of the towers.
        horizon: steps of an episode whose clock is an input; None where there is no clock.
    """

    scale: torch.Tensor
    cost_scale: torch.Tensor

    def __init__(
        self,
        state_size: int,
        scaling: FeatureScaling,
        *,
        multipliers: tuple[float, ...],
        hidden: int,
        horizon: int | None,
    ) -> None:
        super().__init__()
        self.horizon = horizon
        state_size += 0 if horizon is None else 1 + len(LAST_STEPS)
        self.state = nn.Sequential(
            nn.Linear(state_size, hidden), nn.SiLU(),
            nn.Linear(hidden, hidden), nn.SiLU(),
            nn.Linear(hidden, len(multipliers)),
        )  # fmt: skip
        self.tower = AmountTower(state_size, AmountFeatures(scaling), hidden, len(multipliers))
        nn.init.zeros_(self.tower.output.weight)
        self.cost = nn.Linear(hidden, len(multipliers))
        self.register_buffer("scale", torch.ones(len(multipliers)))
        self.register_buffer("cost_scale", torch.ones(()))

    def forward(
        self, states: torch.Tensor, clock: torch.Tensor | None, amounts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Utility-to-go and cost-to-go, each `(B, G, n)` over its scale.

        Args:
            states: `(B, S)`.
            clock: `(B,)` share of the episode that has passed, or None without a clock.
            amounts: `(B, G)` or `(G,)`.
        """
        if self.horizon is not None:
            assert clock is not None
            states = torch.cat([states, self._time(clock)], dim=-1)
        representation = self.tower.representation(states, amounts)
        # Cost-to-go jumps where utility is smooth; it reads the tower without pulling at it.
        utility = self.state(states)[..., None, :] + self.tower.output(representation)
        return utility, self.cost(representation.detach())

    def _time(self, clock: torch.Tensor) -> torch.Tensor:
        """The clock `(B,)` as `(B, 1 + len(LAST_STEPS))`: linear, and how near the last step is on several scales.

        What is paid in the last steps tires nobody any more: there the value changes from one step to the next.
        """
        assert self.horizon is not None
        following = (1 - clock[:, None]) * self.horizon - 1
        return torch.cat([2 * clock[:, None] - 1, *(torch.exp(-following / steps) for steps in LAST_STEPS)], dim=-1)
