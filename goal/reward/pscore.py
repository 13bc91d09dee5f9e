"""P-Score: what one payment brings, objective by objective (paper, Section "Reward Model Training").

Shapes: B decisions, G amounts of each, K objectives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, pad, silu

from goal.config import PolicyConfig
from goal.log import FeatureScaling, History, Objective
from goal.model.embedding import AmountFeatures
from goal.reward.bins import Bins
from goal.reward.state import DecisionState

REVENUE, COST = "revenue", "cost"
FUSED = "fused"
LATER = "later"
SURPRISE = "surprise"
BESIDE = (LATER, SURPRISE)
"""Losses that stand beside those of the objectives."""
LATER_STEPS = 16
"""Steps ahead whose revenue `PScore.later_loss` foretells."""
INTERACTION_RANK = 8
"""Rank of the product by which the past changes what amounts bring."""


class AmountTower(nn.Module):
    """Two-layer perceptron over a state and an amount; the state's part is computed once for all amounts."""

    def __init__(self, state_size: int, amount: AmountFeatures, hidden: int, outputs: int) -> None:
        super().__init__()
        self.amount = amount
        self.from_state = nn.Linear(state_size, hidden)
        self.from_amount = nn.Linear(amount.size, hidden, bias=False)
        self.hidden = nn.Linear(hidden, hidden)
        self.output = nn.Linear(hidden, outputs)

    def representation(self, states: torch.Tensor, amounts: torch.Tensor) -> torch.Tensor:
        """States `(..., S)` and amounts `(..., G)` to `(..., G, hidden)`."""
        mixed = silu(self.from_state(states)[..., None, :] + self.from_amount(self.amount(amounts)))
        return silu(self.hidden(mixed))


class ResponseTower(AmountTower):
    """Logits of a response: a perceptron over the present and an amount, to which the past is added and with which it
    is multiplied, at a low rank.

    A policy brings about pasts that no logged behaviour shows. A perceptron that mixes them with amounts extrapolates
    there at will; a sum, and a product of few terms, go on as they began.

    Args:
        past_size: leading columns of a state, which tell of the past.
        visible: columns of a state, those of the past among them.
        amount: features of amounts.
        hidden: width of the perceptron.
        outputs: logits.
    """

    def __init__(self, past_size: int, visible: int, amount: AmountFeatures, hidden: int, outputs: int) -> None:
        super().__init__(visible - past_size, amount, hidden, outputs)
        self.past_size = past_size
        self.added = nn.Linear(past_size, outputs, bias=False)
        self.mixes = nn.Linear(hidden, INTERACTION_RANK)
        self.multiplied = nn.Linear(past_size, INTERACTION_RANK * outputs)

    def forward(self, states: torch.Tensor, amounts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits `(..., G, outputs)` and their representation `(..., G, hidden)`.

        Args:
            states: `(..., visible)`, of which the past comes first.
            amounts: `(..., G)`.
        """
        past, present = states.tensor_split([self.past_size], dim=-1)
        representation = self.representation(present, amounts)
        factors = self.multiplied(past).unflatten(-1, (INTERACTION_RANK, -1))
        product = self.mixes(representation) @ factors
        return self.output(representation) + self.added(past)[..., None, :] + product, representation


class PScore(nn.Module):
    """One tower an objective on a shared state, and a perceptron that fuses them into one utility.

    A binary objective is a probability, trained by binary cross-entropy. An amount is zero or in one of K bins: how
    likely each is, by cross-entropy, and by what factor its mean there differs from the bin's, by the gamma deviance
    log mu + y / mu with a logarithmic link. The expectation is the sum over the bins: a single mean of all that is
    positive is slow to learn where small and large outcomes mix (docs/decisions.md). The fused utility regresses the
    sum of the further objectives, each over its scale: revenue and cost enter R and C as money already.
    The weights of the losses are learned from their uncertainty: sum_k exp(-s_k) L_k + s_k (Kendall, Gal and Cipolla,
    "Multi-task learning using uncertainty to weigh losses", 2018).

    Args:
        config: from `goal.reward.state.state_config`.
        scaling: measured on the training rows.
        objectives: the log's further objectives.
        bins: of each amount (revenue, cost where it is learned, objectives that are amounts), from the training rows;
            absent ones have a single bin at the scale of the outcome.
        cost_tower: whether cost is learned (the schema has no rule for it).
        clock: see `DecisionState`.
    """

    scales: torch.Tensor

    def __init__(
        self,
        config: PolicyConfig,
        scaling: FeatureScaling,
        *,
        objectives: tuple[Objective, ...] = (),
        bins: Mapping[str, Bins] | None = None,
        cost_tower: bool = False,
        clock: int | None = None,
    ) -> None:
        super().__init__()
        self.state = DecisionState(config, scaling, clock=clock)
        amount = AmountFeatures(scaling)
        kinds = {REVENUE: "amount", **({COST: "amount"} if cost_tower else {})}
        kinds |= {objective.name: objective.kind for objective in objectives}
        self.kinds = kinds
        self.positions = {name: index for index, name in enumerate(kinds)}
        outcome_scale = dict(zip((REVENUE, *(o.name for o in objectives)), scaling.outcome_scale, strict=True))
        scales = [
            1.0 if kind == "binary" else outcome_scale.get(name, scaling.incentive_scale)
            for name, kind in kinds.items()
        ]
        self.register_buffer("scales", torch.tensor(scales, dtype=torch.float32), persistent=False)
        hidden = config.dimension
        towers = []
        for (name, kind), scale in zip(kinds.items(), scales, strict=True):
            sizes = (bins or {}).get(name) or Bins((), (scale,))
            outputs = 1 if kind == "binary" else 1 + len(sizes.means)
            towers.append(ResponseTower(self.state.past_size, self.state.visible, amount, hidden, outputs))
            self.register_buffer(f"edges_{self.positions[name]}", torch.tensor(sizes.edges), persistent=False)
            self.register_buffer(f"means_{self.positions[name]}", torch.tensor(sizes.means), persistent=False)
        self.towers = nn.ModuleList(towers)
        fused = self.state.past_size + hidden * len(kinds)
        self.fusion = nn.Sequential(nn.Linear(fused, hidden), nn.SiLU(), nn.Linear(hidden, 1))
        self.later = nn.Linear(self.state.size, LATER_STEPS) if self.state.recall is not None else None
        self.log_variances = nn.Parameter(torch.zeros(len(kinds) + 1))

    @property
    def _towers(self) -> list[ResponseTower]:
        return cast(list[ResponseTower], list(self.towers))

    def losses(
        self, states: torch.Tensor, amounts: torch.Tensor, labels: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return each objective's mean loss over the decisions.

        Args:
            states: `(B, S)` from `DecisionState`.
            amounts: `(B,)` what was paid.
            labels: `(B,)` what came of it, by objective, in its own unit.
        """
        states = states[..., : self.state.visible]
        representations, losses = [], {}
        utility = torch.zeros_like(amounts)
        for tower, scale, (name, kind) in zip(self._towers, self.scales, self.kinds.items(), strict=True):
            output, representation = (part[:, 0] for part in tower(states, amounts[:, None]))
            representations.append(representation)
            label = labels[name]
            if kind == "binary":
                loss = binary_cross_entropy_with_logits(output[:, 0], (label > 0).to(output.dtype))
            else:
                edges, means = self._bins(self.positions[name])
                place = torch.bucketize(label, edges)
                occurred = label > 0
                loss = cross_entropy(self._logits(output), torch.where(occurred, place + 1, 0))
                # exp(-log_factor) * y stays finite: the link is bounded where the data are.
                log_factor = output[:, -1].clamp(-15, 15)
                deviance = log_factor + label / means[place] * torch.exp(-log_factor)
                loss = loss + deviance.where(occurred, 0).mean()
            losses[name] = loss
            if name not in (REVENUE, COST):
                utility = utility + label / scale
        fused = self.fusion(torch.cat([states[..., : self.state.past_size], *representations], dim=-1))[:, 0]
        losses[FUSED] = (fused - utility).square().mean()
        return losses

    def later_loss(self, history: History, states: torch.Tensor) -> torch.Tensor:
        """Mean squared error of the revenue of the steps that follow, as log(1 + revenue / scale).

        What was paid some steps ago may say nothing of the present response and all of a later one. This loss trains
        the recollection in the state, which the value networks read, and nothing else.

        Args:
            history: B windows.
            states: `(B, L, S)` of their events.
        """
        assert self.later is not None
        steps, device = LATER_STEPS, states.device
        revenue = torch.log1p(history.outcomes[..., 0].clamp(min=0) / self.scales[self.positions[REVENUE]])
        following = pad(revenue, (0, steps)).unfold(1, steps, 1)[:, 1:]
        ahead = torch.arange(1, steps + 1, device=device)
        place = torch.arange(history.window, device=device)[:, None] + ahead
        known = place < (history.lengths - 1)[:, None, None]
        seen, recalled = states.split([self.state.visible, self.state.size - self.state.visible], dim=-1)
        error = self.later(torch.cat([seen.detach(), recalled], dim=-1)) - following
        return error.square().where(known, 0).sum() / known.sum().clamp(min=1)

    def _bins(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        return getattr(self, f"edges_{position}"), getattr(self, f"means_{position}")

    @staticmethod
    def _logits(output: torch.Tensor) -> torch.Tensor:
        """Logits `(..., 1 + K)` of zero and of each bin; zero's is 0, so that one bin is a logistic regression."""
        return torch.cat([torch.zeros_like(output[..., :1]), output[..., :-1]], dim=-1)

    def weigh(self, losses: dict[str, torch.Tensor]) -> torch.Tensor:
        """Sum of the losses with learned weights; those `BESIDE` the objectives' have none."""
        objectives = torch.stack([loss for name, loss in losses.items() if name not in BESIDE])
        weighted = torch.exp(-self.log_variances) * objectives + self.log_variances
        return weighted.sum() + sum(losses[name] for name in BESIDE if name in losses)

    def expected(self, states: torch.Tensor, amounts: torch.Tensor, name: str = REVENUE) -> torch.Tensor:
        """Expected value `(B, G)` of an objective, in its own unit, at amounts `(B, G)` or `(G,)`."""
        position = self.positions[name]
        tower = self._towers[position]
        output, _ = tower(states[..., : self.state.visible], amounts)
        if self.kinds[name] == "binary":
            return torch.sigmoid(output[..., 0])
        _, means = self._bins(position)
        if len(means) == 1:
            expected = torch.sigmoid(output[..., 0]) * means
        else:
            expected = self._logits(output).softmax(dim=-1)[..., 1:] @ means
        return expected * torch.exp(output[..., -1].clamp(-15, 15))

    def draw(self, states: torch.Tensor, amounts: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Draw what comes in: 0 for no revenue, k for the k-th bin of it, int64 `(B,)` on the CPU.

        Args:
            states: `(B, S)`.
            amounts: `(B,)` what is paid.
            generator: on the CPU.
        """
        return torch.multinomial(self.chances(states, amounts[:, None])[:, 0].cpu(), 1, generator=generator)[:, 0]

    def chances(self, states: torch.Tensor, amounts: torch.Tensor) -> torch.Tensor:
        """Chances `(B, G, 1 + K)` of no revenue and of each of its K bins, at amounts `(B, G)` or `(G,)`."""
        tower = self._towers[self.positions[REVENUE]]
        output, _ = tower(states[..., : self.state.visible], amounts)
        return self._logits(output).softmax(dim=-1)

    def bin_of(self, revenue: torch.Tensor) -> torch.Tensor:
        """Where each revenue `(B,)` falls, as `draw` counts."""
        edges, _ = self._bins(self.positions[REVENUE])
        return torch.where(revenue > 0, torch.bucketize(revenue, edges.to(revenue.device)) + 1, 0)

    def fused(self, states: torch.Tensor, amounts: torch.Tensor) -> torch.Tensor:
        """The fused utility `(B, G)`: the expected sum of the further objectives, each over its scale."""
        states = states[..., : self.state.visible]
        representations = [tower(states, amounts)[1] for tower in self._towers]
        past = states[:, None, : self.state.past_size].expand(-1, amounts.shape[-1], -1)
        return self.fusion(torch.cat([past, *representations], dim=-1))[..., 0]

    def predict(self, history: History, amounts: torch.Tensor, name: str = REVENUE) -> torch.Tensor:
        """Expected value `(B, G)` of an objective for B windows at amounts `(B, G)` or `(G,)`."""
        return self.expected(self.state.pending(history), amounts, name)
