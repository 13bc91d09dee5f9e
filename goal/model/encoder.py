"""Hierarchical causal encoder: dilated causal convolution, then attention under the multiplier's token.

The convolution does not see the multiplier, so its states are computed once and shared by every multiplier of a state.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import gelu, layer_norm, leaky_relu

from goal.config import PolicyConfig
from goal.model.attention import Attention, FeedForward
from goal_kernels import causal_conv_stack, dilated_causal_conv


class CausalStates(nn.Module):
    """J dilated causal convolution blocks, LayerNorm(x + conv(x)), then linear + LeakyReLU (paper, Eqs. of the DCC)."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        dimension, layers = config.dimension, len(config.dilations) if config.convolution else 0
        self.dilations = config.dilations[:layers]
        self.linear_inside = config.convolution_activation == "linear"
        self.weights = nn.Parameter(torch.empty(layers, config.kernel_size, dimension, dimension))
        self.biases = nn.Parameter(torch.zeros(layers, dimension))
        self.norm_weights = nn.Parameter(torch.ones(layers, dimension))
        self.norm_biases = nn.Parameter(torch.zeros(layers, dimension))
        self.output = nn.Linear(dimension, dimension)
        nn.init.normal_(self.weights, std=(config.kernel_size * dimension) ** -0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(B, L, D)` embeddings to `(B, L, D)` causal states."""
        if not self.dilations:
            pass
        elif self.linear_inside:
            x = causal_conv_stack(
                x, self.weights, self.biases, self.norm_weights, self.norm_biases, dilations=self.dilations
            )
        else:
            for layer, dilation in enumerate(self.dilations):
                inside = gelu(dilated_causal_conv(x, self.weights[layer], self.biases[layer], dilation=dilation))
                x = layer_norm(x + inside, x.shape[-1:], self.norm_weights[layer], self.norm_biases[layer])
        return leaky_relu(self.output(x))


class EncoderLayer(nn.Module):
    """Causal self-attention and feed-forward, each behind a LayerNorm and beside a residual."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dimension)
        self.attention = Attention(config.dimension, config.heads)
        self.feedforward_norm = nn.LayerNorm(config.dimension)
        self.feedforward = FeedForward(config.dimension, config.feedforward)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(B, 1 + L, D)` to the same; a position sees only what stands before it."""
        normed = self.attention_norm(x)
        x = x + self.dropout(self.attention(normed, self.attention.keys_values(normed), causal=True))
        return x + self.dropout(self.feedforward(self.feedforward_norm(x)))


class HistoryEncoder(nn.Module):
    """Self-attention over [multiplier; causal states] (paper, Eq. of H_enc)."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.multiplier_max = config.multiplier_max
        self.condition = FeedForward(config.dimension, config.dimension)
        self.condition_input = nn.Linear(1, config.dimension)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))
        self.norm = nn.LayerNorm(config.dimension)

    def embed_multiplier(self, multiplier: torch.Tensor) -> torch.Tensor:
        """MLP(multiplier / multiplier_max): `(B,)` to `(B, D)` (docs/decisions.md 10)."""
        scaled = (multiplier / self.multiplier_max).to(self.condition_input.weight.dtype)
        return self.condition(torch.nn.functional.silu(self.condition_input(scaled[:, None])))

    def forward(self, causal_states: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """Causal states `(B, L, D)` and the multiplier's vector `(B, D)` to the memory `(B, 1 + L, D)`."""
        x = torch.cat([condition[:, None].to(causal_states.dtype), causal_states], dim=1)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)
