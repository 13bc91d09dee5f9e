"""What happened before each event of a window, in a form that adds up and that a policy can go on from.

Shapes: B windows of L events, D columns of features, O outcomes (revenue first), M columns carried.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import pad, silu

from goal.config import PolicyConfig
from goal.log import FeatureScaling, History
from goal.model.embedding import AmountFeatures, StateFeatures

KEPT = (0.0, 0.5, 0.8, 0.93, 0.98)
"""Shares of an average that are left after another event; 0 is the last event alone."""
RECENT = 16
"""Events whose payments are also kept one by one, in a few columns each: what comes a fixed number of steps late."""

Event = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Numeric and categorical features, incentives and outcomes of B events."""


class Adstock(nn.Module):
    """The past as averages that fade at several rates ("adstock": Broadbent, "One way TV advertisements work", 1979).

    Payments are averaged as learned features that are nothing where nothing was paid, and the last of them kept one by
    one. Outcomes enter by what they were beyond what was to be expected of them (see `Surprise`): what a payment
    brought is not counted twice, and pasts that nobody logged, such as of users never paid or always paid, are sums of
    what the log does show. Averages are linear in what they average, so one event more is one step on (`after`).
    docs/decisions.md has what else was tried.

    Args:
        config: from `state_config`; features and width are taken from it.
        scaling: measured on the training rows. Outcomes count from 0 on.
    """

    kept: torch.Tensor
    outcome_scale: torch.Tensor

    def __init__(self, config: PolicyConfig, scaling: FeatureScaling) -> None:
        super().__init__()
        dimension = config.dimension
        self.width = max(1, dimension // 2)
        self.recent = max(1, self.width // 4)
        """Leading features of a payment that are kept one by one."""
        averages = self.width * len(KEPT)
        self.sizes = (averages, averages, self.recent * RECENT)
        """Columns of the averages of payments, of those of surprises, and of the last payments."""
        self.size = sum(self.sizes)
        """M, the columns carried from event to event."""
        self.features = StateFeatures(config, scaling)
        self.payment = nn.Sequential(
            AmountFeatures(scaling), nn.Linear(AmountFeatures.size, dimension), nn.SiLU(),
            nn.Linear(dimension, self.width, bias=False),
        )  # fmt: skip
        self.surprise = Surprise(
            dimension + self.width + averages, dimension, outcomes=config.outcomes, width=self.width
        )
        self.output = nn.Linear(self.size, dimension)
        self.register_buffer("kept", torch.tensor(KEPT), persistent=False)
        outcome_scale = torch.tensor(scaling.outcome_scale, dtype=torch.float32)
        self.register_buffer("outcome_scale", outcome_scale, persistent=False)

    def carry(
        self, numeric: torch.Tensor, history: History, at: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What each event finds, `(B, L, M)`, or the events at places `(B,)` alone, `(B, M)`; at first all is 0.

        Returns:
            That, and the mean squared error of the outcomes that were to be expected of the events before the last.
        """
        age = torch.arange(history.window, device=numeric.device)
        age = age[:, None] - 1 - age
        fading = self.kept[:, None, None] ** age.clamp(min=0) * (1 - self.kept)[:, None, None]
        fading = fading.where(age >= 0, 0)
        known = torch.arange(history.window, device=numeric.device) < history.lengths[:, None] - 1
        payments = self._payments(history.incentives.where(known, 0))
        paid = torch.einsum("kts,bsw->btkw", fading, payments).flatten(2)
        features = self.features(numeric, history.categorical)
        seen = self._seen(history.outcomes.where(known[..., None], 0))
        surprises, error = self.surprise(torch.cat([features, payments, paid], dim=-1), seen)
        error = error.where(known, 0).sum() / known.sum().clamp(min=1)
        # RECENT zeros before the window; the event itself is not in its own past.
        padded = pad(payments[:, :-1, : self.recent], (0, 0, RECENT, 0))
        if at is None:
            surprised = torch.einsum("kts,bsw->btkw", fading, surprises).flatten(2)
            recent = padded.unfold(1, RECENT, 1).flip(-1).transpose(2, 3).flatten(2)
            return torch.cat([paid, surprised, recent], dim=-1), error
        rows = torch.arange(len(history), device=numeric.device)
        surprised = (fading[:, at].transpose(0, 1) @ surprises).flatten(1)
        before = at[:, None] + torch.arange(RECENT, device=numeric.device).flip(0)
        recent = padded[rows[:, None], before].flatten(1)
        return torch.cat([paid[rows, at], surprised, recent], dim=-1), error

    def after(self, carried: torch.Tensor, event: Event) -> torch.Tensor:
        """What the next event finds `(B, M)`, from what an event found `(B, M)`, was and brought."""
        numeric, categorical, incentives, outcomes = event
        paid, surprised, recent = carried.split(self.sizes, dim=-1)
        kept = self.kept[:, None]

        def average(before: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
            faded = kept * before.unflatten(-1, (len(KEPT), self.width))
            return (faded + (1 - kept) * features[:, None]).flatten(1)

        payments = self._payments(incentives)
        features = self.features(numeric, categorical)
        surprises, _ = self.surprise(torch.cat([features, payments, paid], dim=-1), self._seen(outcomes))
        recent = torch.cat([payments[:, : self.recent], recent[:, : -self.recent]], dim=-1)
        return torch.cat([average(paid, payments), average(surprised, surprises), recent], dim=-1)

    def read(self, carried: torch.Tensor) -> torch.Tensor:
        """Carried columns `(..., M)` as `(..., D)`.

        Half of them linearly: what only adds up would otherwise be put together from bends, whose cross terms cancel
        on the log and add up in a past that is all alike.
        """
        straight, bent = self.output(carried).tensor_split(2, dim=-1)
        return torch.cat([straight, silu(bent)], dim=-1)

    def _payments(self, incentives: torch.Tensor) -> torch.Tensor:
        return self.payment(incentives) - self.payment(incentives.new_zeros(1))

    def _seen(self, outcomes: torch.Tensor) -> torch.Tensor:
        """Outcomes `(..., O)` as `(..., 1 + O)`: whether there was revenue, and how much of each."""
        amounts = torch.log1p((outcomes / self.outcome_scale).clamp(min=0))
        return torch.cat([(outcomes[..., :1] > 0).to(amounts.dtype), amounts], dim=-1)


class Surprise(nn.Module):
    """Outcomes of events beyond what was to be expected of them, as learned features that are nothing where an outcome
    is as expected.

    What is expected is trained by its own error above all; what the surprises are good for pulls at it a little.

    Args:
        known: columns of what is known of an event and was paid.
        dimension: width of the perceptron.
        outcomes: O.
        width: of the features.
    """

    def __init__(self, known: int, dimension: int, *, outcomes: int, width: int) -> None:
        super().__init__()
        self.context = nn.Linear(known, dimension)
        self.expect = nn.Linear(dimension, 1 + outcomes)
        self.gate = nn.Linear(1 + outcomes, width, bias=False)
        self.weight = nn.Linear(dimension, width)

    def forward(self, events: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Features `(..., width)` of surprises, and the mean squared error `(...)` of what was expected.

        Args:
            events: `(..., known)` what was known of the events and what was paid.
            seen: `(..., 1 + O)` their outcomes.
        """
        context = silu(self.context(events))
        surprise = seen - self.expect(context)
        return self.gate(surprise) * silu(self.weight(context)), surprise.square().mean(dim=-1)
