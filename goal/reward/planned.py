"""What a payment does to everything that comes later, by exact recursion over values linear in random features.

Where the features of a decision say all, the P-Score and what amounts do to the next features make a model of the
world, and values need not be learned by a network: with V(s) = w . phi(s), the expectation of V over what comes of an
amount is w . E[phi(next s)], so features of next states are averaged once and each step back is one least-squares fit
(fitted value iteration: Munos and Szepesvári, "Finite-time bounds for fitted value iteration", 2008; random features:
Rahimi and Recht, "Random features for large-scale kernel machines", 2007). `goal.training.planning` does it.

Shapes: B decisions, S columns of a state, D features, G amounts of the grid, n multipliers, R columns of the basis.
"""

from __future__ import annotations

import torch
from torch import nn

FEATURES = 512
"""Random features; the columns of the state themselves stand beside them."""
RANK = 64
"""R, directions in which the values of all steps and multipliers are kept."""
LARGEST = 6.0
"""Standard deviations from the mean at which a column of a state is cut."""


class PlannedValue(nn.Module):
    """Utility-to-go and cost-to-go of every amount of the grid under every multiplier, once they are planned.

    Args:
        state_size: S.
        amounts: G.
        multipliers: n.
        horizon: steps of an episode whose clock is an input; None where there is no clock, and one step stands for all.
    """

    mean: torch.Tensor
    spread: torch.Tensor
    direction: torch.Tensor
    phase: torch.Tensor
    centre: torch.Tensor
    """`(D,)` mean of the features."""
    effect: torch.Tensor
    """`(D, G * R)`: what each amount makes of the features of a state, in the basis."""
    offset: torch.Tensor
    """`(G * R,)` likewise at the mean state."""
    weights: torch.Tensor
    """`(steps + 1, R, 2 n)` of the utilities and of the costs, by the step that follows."""
    level: torch.Tensor
    """`(steps + 1, 2 n)` means."""
    low: torch.Tensor
    high: torch.Tensor
    """`(steps + 1, 2 n)`: no state is worth less, or more, than any that was planned from."""

    def __init__(self, state_size: int, *, amounts: int, multipliers: int, horizon: int | None) -> None:
        super().__init__()
        self.horizon = horizon
        self.amounts = amounts
        self.lookahead: int | None = None
        """Steps ahead that count; None: all. For the report."""
        width, outputs = state_size + FEATURES, 2 * multipliers
        steps = 1 if horizon is None else horizon
        sizes = {
            "mean": (state_size,), "spread": (state_size,), "direction": (state_size, FEATURES), "phase": (FEATURES,),
            "centre": (width,), "effect": (width, amounts * RANK), "offset": (amounts * RANK,),
            "weights": (steps + 1, RANK, outputs),
            **dict.fromkeys(("level", "low", "high"), (steps + 1, outputs)),
        }  # fmt: skip
        for name, size in sizes.items():
            self.register_buffer(name, torch.zeros(size))

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """Features `(B, D)` of states `(B, S)`, less their mean over the planned ones."""
        columns = ((states - self.mean) / self.spread).clamp(-LARGEST, LARGEST)
        return torch.cat([torch.tanh(columns @ self.direction + self.phase), columns], dim=-1) - self.centre

    def forward(self, states: torch.Tensor, clock: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Utility and cost, each `(B, G, n)` in money, from the next event on.

        Args:
            states: `(B, S)`.
            clock: `(B,)` share of the episode that has passed, or None without a clock.
        """
        step = self._following(clock, len(states))
        basis = (self.features(states) @ self.effect + self.offset).unflatten(-1, (self.amounts, RANK))
        values = torch.baddbmm(self.level[step][:, None], basis, self.weights[step])
        values = values.clamp(self.low[step][:, None], self.high[step][:, None])
        utility, cost = values.chunk(2, dim=-1)
        return utility, cost

    def _following(self, clock: torch.Tensor | None, count: int) -> torch.Tensor:
        """Index `(B,)` of the step that follows each decision."""
        if self.horizon is None or clock is None:
            return torch.zeros(count, dtype=torch.int64, device=self.mean.device)
        step = (clock * self.horizon).round().long().clamp(0, self.horizon - 1) + 1
        if self.lookahead is None:
            return step
        # So few steps before the end, no more are left to look ahead.
        return torch.where(step < self.horizon, step.clamp(min=self.horizon - self.lookahead), step)
