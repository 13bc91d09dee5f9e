"""Generative decoder: causal self-attention, cross-attention and experts routed by the multiplier.

Shapes: B states, m sequences of each state, T tokens, D channels, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import torch
from torch import nn

from goal.config import PolicyConfig
from goal.model.attention import Attention
from goal.model.tree import TokenTree
from goal_kernels import routed_experts


@dataclass
class Memory:
    """What the decoder reads: the multiplier's vector, and each layer's keys and values of the encoder's states."""

    condition: torch.Tensor
    """`(B, D)`."""
    mask: torch.Tensor
    """`(B, 1, 1, 1 + L)` bool, true at valid positions."""
    keys_values: list[tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Cache:
    """Keys and values of the tokens decoded so far, one pair a layer, each `(B * m, heads, t, D / heads)`."""

    layers: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


class Experts(nn.Module):
    """E experts of which each token takes k, chosen by [token; multiplier] (paper, Eq. of the MoE layer)."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        dimension, hidden, count = config.dimension, config.expert_hidden, config.experts
        self.per_token = config.experts_per_token
        self.gate = nn.Parameter(torch.empty(count, 2 * dimension))
        self.w1 = nn.Parameter(torch.empty(count, dimension, hidden))
        self.b1 = nn.Parameter(torch.zeros(count, hidden))
        self.w2 = nn.Parameter(torch.empty(count, hidden, dimension))
        self.b2 = nn.Parameter(torch.zeros(count, dimension))
        nn.init.normal_(self.gate, std=(2 * dimension) ** -0.5)
        nn.init.normal_(self.w1, std=dimension**-0.5)
        nn.init.normal_(self.w2, std=hidden**-0.5)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`(B, Q, D)` to `(B, Q, D)` and the routing probabilities `(B, Q, E)`."""
        out, routing = routed_experts(
            x.flatten(0, 1), condition, self.gate, self.w1, self.b1, self.w2, self.b2, k=self.per_token
        )
        return out.view_as(x), routing.probabilities.view(*x.shape[:2], len(self.gate))


class DecoderLayer(nn.Module):
    """One decoder block."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.self_norm = nn.LayerNorm(config.dimension)
        self.self_attention = Attention(config.dimension, config.heads)
        self.cross_norm = nn.LayerNorm(config.dimension)
        self.cross_attention = Attention(config.dimension, config.heads)
        self.experts_norm = nn.LayerNorm(config.dimension)
        self.experts = Experts(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: torch.Tensor, memory: Memory, layer: int, cache: Cache | None, sees: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`(B, m, T, D)` to the same and routing probabilities `(B, m * T, E)`; with a cache, T tokens follow it.

        ``sees`` `(T, T)` says which tokens each attends to; None: itself and those before it.
        """
        batch, samples, steps, _ = x.shape
        normed = self.self_norm(x).flatten(0, 1)
        keys_values = self.self_attention.keys_values(normed)
        if cache is not None:
            if layer < len(cache.layers):
                key, value = cache.layers[layer]
                keys_values = torch.cat([key, keys_values[0]], dim=2), torch.cat([value, keys_values[1]], dim=2)
                cache.layers[layer] = keys_values
            else:
                cache.layers.append(keys_values)
        attended = self.self_attention(normed, keys_values, mask=sees, causal=steps > 1 and sees is None)
        x = x + self.dropout(attended.view_as(x))
        x = x.reshape(batch, samples * steps, x.shape[-1])
        attended = self.cross_attention(self.cross_norm(x), memory.keys_values[layer], mask=memory.mask)
        x = x + self.dropout(attended)
        mixed, probabilities = self.experts(self.experts_norm(x), memory.condition)
        x = x + self.dropout(mixed)
        return x.view(batch, samples, steps, x.shape[-1]), probabilities


class IncentiveDecoder(nn.Module):
    """Writes an amount as tokens; the output projection is the embedding table of the tokens, special ones included."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary_size, config.dimension)
        self.positions = nn.Embedding(config.max_length, config.dimension)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers))
        self.norm = nn.LayerNorm(config.dimension)
        nn.init.normal_(self.tokens.weight, std=config.dimension**-0.5)
        nn.init.normal_(self.positions.weight, std=config.dimension**-0.5)

    def remember(self, states: torch.Tensor, condition: torch.Tensor, lengths: torch.Tensor) -> Memory:
        """Project the encoder's `(B, 1 + L, D)` once for all steps; ``lengths`` counts valid events, `(B,)`."""
        place = torch.arange(states.shape[1], device=states.device)
        mask = (place <= lengths[:, None])[:, None, None]
        layers = cast(list[DecoderLayer], list(self.layers))
        return Memory(condition, mask, [layer.cross_attention.keys_values(states) for layer in layers])

    def forward(
        self, memory: Memory, tokens: torch.Tensor, *, start: int = 0, cache: Cache | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Score what follows each token.

        Args:
            memory: from `remember`.
            tokens: `(B, m, T)` ids; the first stands at position ``start``.
            cache: what was decoded before ``start``; extended in place.

        Returns:
            Logits `(B, m, T, V)`, neither masked nor corrected, and each layer's routing probabilities `(B, m * T, E)`.
        """
        positions = torch.arange(start, start + tokens.shape[-1], device=tokens.device)
        return self._run(memory, tokens, positions, cache=cache)

    def score_tree(self, memory: Memory, tree: TokenTree) -> torch.Tensor:
        """Logits `(B, N, V)` of what follows each node of a tree, neither masked nor corrected."""
        tokens = tree.tokens.expand(len(memory.condition), 1, -1)
        return self._run(memory, tokens, tree.depths, sees=tree.sees)[0][:, 0]

    def _run(
        self,
        memory: Memory,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        *,
        cache: Cache | None = None,
        sees: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        x = self.tokens(tokens) + self.positions(positions)
        routing = []
        for index, layer in enumerate(self.layers):
            x, probabilities = layer(x, memory, index, cache, sees)
            routing.append(probabilities)
        return self.norm(x) @ self.tokens.weight.T, routing
