"""The passes of each op, forward and backward, in order: what is allocated, what is kept, what is launched.

Functions here take checked tensors of any strides, allocate every output and run on the input's device. Inputs whose
rows do not lie at one stride, channels side by side, are copied once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from goal_kernels._launch import on_device_of
from goal_kernels.dilated_conv import configurations as table
from goal_kernels.dilated_conv.triton_launch import (
    as_rows,
    block,
    column_sum,
    convolve,
    norm_backward,
    norm_parts,
    stack_at_once,
    sum_vectors,
    weight_gradient,
)


class Parameters(NamedTuple):
    """What one layer, or every layer along a leading axis, multiplies, adds and normalises with."""

    weight: Tensor
    bias: Tensor
    norm_weight: Tensor
    norm_bias: Tensor

    def contiguous(self) -> Parameters:
        return Parameters(*(tensor.contiguous() for tensor in self))

    def layer(self, index: int) -> Parameters:
        return Parameters(self.weight[index], self.bias[index], self.norm_weight[index], self.norm_bias[index])


def conv(x: Tensor, weight: Tensor, bias: Tensor | None, dilation: int) -> Tensor:
    """(B, L, Dout) of x (B, L, Din), weight (K, Din, Dout)."""
    out = x.new_empty(x.shape[0], x.shape[1], weight.shape[2])
    with on_device_of(x):
        convolve(as_rows(x), weight.contiguous(), bias, out, x.shape[1], dilation)
    return out


def conv_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, dilation: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias (empty where there is none)."""
    grad_x, grad_weight = x.new_empty(x.shape), weight.new_empty(weight.shape)
    grad_bias = x.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    with on_device_of(x):
        grad, x = as_rows(grad), as_rows(x)
        length = grad_x.shape[1]
        convolve(grad, weight.contiguous(), None, grad_x, length, dilation, reverse=True)
        weight_gradient(x, x, grad, grad_weight.unsqueeze(0), length, (dilation,), 0)
        if bias is not None:
            column_sum(grad, grad_bias)
    return grad_x, grad_weight, grad_bias


def stack(
    x: Tensor,
    weights: Tensor,
    biases: Tensor,
    norm_weights: Tensor,
    norm_biases: Tensor,
    dilations: Sequence[int],
    eps: float,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, hidden (J-1, B, L, D) and rstd (J, B, L); the latter two are empty unless `keep`."""
    layers = len(dilations)
    kept = layers if keep else 0
    out = x.new_empty(x.shape)
    hidden = x.new_empty(max(kept - 1, 0), *x.shape)
    rstd = x.new_empty(kept, *x.shape[:2], dtype=torch.float32)
    if out.numel() == 0:
        return out, hidden, rstd.zero_()
    length, channels = x.shape[1:]
    with on_device_of(x):
        rows = as_rows(x)
        parameters = Parameters(weights, biases, norm_weights, norm_biases).contiguous()
        if layers > 1 and table.fuses_layers(length, channels, x.dtype):
            stack_at_once(rows, *parameters, hidden, out, rstd, length, dilations, eps, keep)
        else:
            # without `keep` two buffers take turns, so that the last layer lands in `out`
            turns = [] if keep or layers == 1 else [out, x.new_empty(x.shape)]
            for layer, dilation in enumerate(dilations):
                after = layers - 1 - layer
                target = out if after == 0 else hidden[layer] if keep else turns[after % 2]
                block(rows, *parameters.layer(layer), target, rstd[layer] if keep else None, length, dilation, eps)
                rows = target.view(-1, channels)
    return out, hidden, rstd


def stack_backward(
    grad: Tensor,
    x: Tensor,
    hidden: Tensor,
    out: Tensor,
    rstd: Tensor,
    weights: Tensor,
    biases: Tensor,
    norm_weights: Tensor,
    norm_biases: Tensor,
    dilations: Sequence[int],
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weights, biases, norm weights and norm biases."""
    grad_x, grad_weights = x.new_empty(x.shape), weights.new_empty(weights.shape)
    grad_biases, grad_norm_weights, grad_norm_biases = (
        tensor.new_empty(tensor.shape) for tensor in (biases, norm_weights, norm_biases)
    )
    if x.numel() == 0:
        for grad in (grad_weights, grad_biases, grad_norm_weights, grad_norm_biases):
            grad.zero_()
        return grad_x, grad_weights, grad_biases, grad_norm_weights, grad_norm_biases
    layers, (length, channels) = len(dilations), x.shape[1:]
    with on_device_of(x):
        source = as_rows(x)
        rows = source.shape[0]
        parameters = Parameters(weights, biases, norm_weights, norm_biases).contiguous()
        normalised = torch.empty_like(out)
        at_once = layers * out.numel() * out.element_size() <= table.KEPT_GRADIENT_BYTES
        inner = x.new_empty(layers if at_once else 1, rows, channels)
        partials = x.new_empty(norm_parts(rows, channels), 3, layers, channels, dtype=torch.float32)
        upstream = as_rows(grad)
        for layer in reversed(range(layers)):
            weight, bias, norm_weight, norm_bias = parameters.layer(layer)
            before = source if layer == 0 else hidden[layer - 1].view(-1, channels)
            block(
                before,
                weight,
                bias,
                norm_weight,
                norm_bias,
                normalised,
                None,
                length,
                dilations[layer],
                eps,
                recompute=True,
            )
            slab = inner[layer if at_once else 0]
            after = out if layer == layers - 1 else hidden[layer]
            norm_backward(upstream, after, normalised, rstd[layer], norm_weight, norm_bias, slab, partials, layer)
            target = grad_x if layer == 0 else x.new_empty(x.shape)
            convolve(slab, weight, None, target, length, dilations[layer], reverse=True, residual=True)
            upstream = target.view(-1, channels)
            if not at_once:
                weight_gradient(source, hidden, slab, grad_weights[layer : layer + 1], length, dilations, layer)
        if at_once:
            weight_gradient(source, hidden, inner, grad_weights, length, dilations, 0)
        sum_vectors(partials, grad_norm_weights, grad_norm_biases, grad_biases)
    return grad_x, grad_weights, grad_biases, grad_norm_weights, grad_norm_biases
