"""Attention and feed-forward blocks shared by encoder and decoder."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention


class Attention(nn.Module):
    """Multi-head attention with the projections apart, so that keys and values can be kept."""

    def __init__(self, dimension: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(dimension, dimension)
        self.key_value = nn.Linear(dimension, 2 * dimension)
        self.output = nn.Linear(dimension, dimension)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """`(B, L, D)` as `(B, heads, L, D / heads)`."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def keys_values(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of `(B, L, D)`, each `(B, heads, L, D / heads)`."""
        key, value = self.key_value(x).chunk(2, dim=-1)
        return self.split(key), self.split(value)

    def forward(
        self,
        x: torch.Tensor,
        keys_values: tuple[torch.Tensor, torch.Tensor],
        *,
        mask: torch.Tensor | None = None,
        causal: bool = False,
    ) -> torch.Tensor:
        """Attend from `(B, Q, D)`; ``mask`` is true where attention may go."""
        key, value = keys_values
        attended = scaled_dot_product_attention(self.split(self.query(x)), key, value, attn_mask=mask, is_causal=causal)
        return self.output(attended.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """Two linear maps around a GELU."""

    def __init__(self, dimension: int, hidden: int) -> None:
        super().__init__()
        self.first = nn.Linear(dimension, hidden)
        self.second = nn.Linear(hidden, dimension)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(..., D)` to `(..., D)`."""
        return self.second(gelu(self.first(x), approximate="tanh"))
