"""Events as vectors: state features, the incentive, and what came of it (docs/decisions.md 9)."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from goal.config import PolicyConfig
from goal.log import FeatureScaling, History


def neutral_scaling(config: PolicyConfig) -> FeatureScaling:
    """Return scales that change nothing, for a policy that never saw a log."""
    count = config.numeric_features
    return FeatureScaling(
        numeric_median=(0.0,) * count,
        numeric_mean=(0.0,) * count,
        numeric_std=(1.0,) * count,
        incentive_scale=1.0,
        incentive_max=max(config.vocabulary),
        outcome_scale=(1.0,) * config.outcomes,
    )


class AmountFeatures(nn.Module):
    """Amounts as two numbers of moderate size: linear, and logarithmic for the heavy tail."""

    size = 2

    def __init__(self, scaling: FeatureScaling) -> None:
        super().__init__()
        self.scale = scaling.incentive_scale
        self.largest = max(scaling.incentive_max, scaling.incentive_scale)

    def forward(self, amounts: torch.Tensor) -> torch.Tensor:
        """Map amounts `(...)` to `(..., 2)` float32."""
        amounts = amounts.to(torch.float32)
        return torch.stack([amounts / self.largest, torch.log1p(amounts / self.scale)], dim=-1)


class StateFeatures(nn.Module):
    """What is known before a decision: standardised numbers, flags of what is missing, categories."""

    median: torch.Tensor
    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, config: PolicyConfig, scaling: FeatureScaling) -> None:
        super().__init__()
        self.register_buffer("median", torch.tensor(scaling.numeric_median, dtype=torch.float32), persistent=False)
        self.register_buffer("mean", torch.tensor(scaling.numeric_mean, dtype=torch.float32), persistent=False)
        self.register_buffer("std", torch.tensor(scaling.numeric_std, dtype=torch.float32), persistent=False)
        with warnings.catch_warnings():  # a log may have no numeric features: a weight without elements is right
            warnings.filterwarnings("ignore", "Initializing zero-element tensors")
            self.linear = nn.Linear(2 * config.numeric_features, config.dimension)
        self.categories = nn.ModuleList(nn.Embedding(size + 1, config.dimension) for size in config.categorical_sizes)

    def scaled(self, numeric: torch.Tensor) -> torch.Tensor:
        """Standardise `(..., F)` numbers; the training median stands in for what is missing."""
        return (torch.where(numeric.isnan(), self.median, numeric) - self.mean) / self.std

    def forward(self, numeric: torch.Tensor, categorical: torch.Tensor) -> torch.Tensor:
        """Map `(..., F)` numbers (NaN: missing) and `(..., C)` codes to `(..., D)`."""
        embedded = self.linear(torch.cat([self.scaled(numeric), numeric.isnan().to(numeric.dtype)], dim=-1))
        for column, table in enumerate(self.categories):
            embedded = embedded + table(categorical[..., column])
        return embedded


class EventEmbedding(nn.Module):
    """The events of a window as `(B, L, D)`; the pending event has learned vectors for incentive and outcome."""

    outcome_scale: torch.Tensor

    def __init__(self, config: PolicyConfig, scaling: FeatureScaling) -> None:
        super().__init__()
        self.state = StateFeatures(config, scaling)
        self.amount = AmountFeatures(scaling)
        self.register_buffer(
            "outcome_scale", torch.tensor(scaling.outcome_scale, dtype=torch.float32), persistent=False
        )
        self.happened = nn.Linear(self.amount.size + 2 * config.outcomes, config.dimension)
        self.pending = nn.Parameter(torch.zeros(config.dimension))

    def forward(self, history: History) -> torch.Tensor:
        """Embed a batch of windows; what lies past `lengths` holds no information."""
        place = torch.arange(history.window, device=history.device)
        pending = place >= history.lengths[:, None] - 1
        # Masked before the arithmetic: whatever stands in the pending event's outcome never reaches a gradient.
        incentives = history.incentives.masked_fill(pending, 0)
        relative = history.outcomes.masked_fill(pending[..., None], 0) / self.outcome_scale
        past = torch.cat([self.amount(incentives), relative, torch.log1p(relative.clamp(min=0))], dim=-1)
        return self.state(history.numeric, history.categorical) + torch.where(
            pending[..., None], self.pending, self.happened(past)
        )
