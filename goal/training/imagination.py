"""States that a policy itself brings about, as the reward model imagines them. No simulator is asked.

Shapes: B trajectories, L events of a window.
"""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import nn

from goal.log import History, Windows
from goal.model import Policy
from goal.training.transitions import Transitions


class ImaginedStates(nn.Module):
    """B trajectories that the policy makes, one event longer at every draw.

    A log's pasts are those of the behaviour that wrote it, and what a network that learned from them alone does in the
    pasts that it brings about itself is anybody's guess (Ross et al., "A reduction of imitation learning and structured
    prediction to no-regret online learning", 2011). So each trajectory begins at a logged window, and at every draw the
    policy pays its most probable amount under the trajectory's multiplier, an outcome is drawn from the P-Score, and
    the next logged features follow, moved by what both do to them (see `Transitions`; Janner et al., "When to trust
    your model", 2019). Where the log ends, and else with chance 1 / steps, another begins.

    All that a checkpoint must hold are buffers, on the CPU.

    Args:
        transitions: of the log.
        multipliers: `(n,)` candidate set.
        count: B.
        steps: mean events of a trajectory that no user's last event ends.
        length: L, that of the windows which the states stand beside.
    """

    decisions: torch.Tensor
    """`(B,)` the logged decisions whose features the pending events have."""
    multipliers: torch.Tensor
    """`(B,)` under which the trajectories are paid."""

    def __init__(
        self, transitions: Transitions, multipliers: torch.Tensor, *, count: int, steps: int, length: int
    ) -> None:
        super().__init__()
        self.transitions, self.candidates, self.steps = transitions, multipliers.cpu(), steps
        self.windows = Windows(transitions.log, transitions.rows, length=length)
        self._following = torch.from_numpy(self.windows.successors().index)
        # The last decision is followed by none: the first draw begins every trajectory.
        self.register_buffer("decisions", torch.full((count,), len(transitions.rows) - 1))
        self.register_buffer("multipliers", torch.zeros(count))
        for field in fields(History):
            column = getattr(self.windows.batch(self.decisions), field.name)
            self.register_buffer(f"history_{field.name}", column)

    @torch.no_grad()
    def draw(self, policy: Policy, generator: torch.Generator) -> History:
        """Return B windows, after one more decision of the policy in each.

        Args:
            policy: what pays; it sees as many events as it was made for.
            generator: on the CPU.
        """
        history = self._history
        amounts, outcomes = self._pay(policy, history, generator)
        present = history.numeric[torch.arange(len(history)), history.lengths - 1]
        effects = self.transitions.effects
        following = effects.next_features(self.decisions, amounts, outcomes, present=present)
        decisions = self._following[self.decisions]
        over = (decisions < 0) | (torch.rand(amounts.shape, generator=generator) < 1 / self.steps)
        begun = torch.randint(len(self.windows), (int(over.sum()),), generator=generator)
        place = torch.arange(len(history))
        place[over] = len(history) + torch.arange(len(begun))
        both = [history.followed_by(amounts, outcomes, *following), self.windows.batch(begun)]
        history = History.cat(both).select(place)
        for field in fields(History):
            getattr(self, f"history_{field.name}").copy_(getattr(history, field.name))
        self.decisions.copy_(decisions)
        self.decisions[over] = begun
        self.multipliers[over] = self.candidates[torch.randint(len(self.candidates), begun.shape, generator=generator)]
        return history

    @property
    def _history(self) -> History:
        return History(*(getattr(self, f"history_{field.name}") for field in fields(History)))

    def _pay(self, policy: Policy, history: History, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Amounts `(B,)` that the policy pays at the pending events, and outcomes `(B, O)`."""
        pscore, device = self.transitions.pscore, self.transitions.device
        history = history.to(device)
        amounts = policy.allocate(history.last(policy.config.window), self.multipliers.to(device)).float()
        bins = pscore.draw(pscore.state.pending(history), amounts, generator)
        outcomes = self.transitions.outcomes(bins, torch.rand(bins.shape, generator=generator))
        return amounts.cpu(), outcomes
