"""Triton implementation: launches, custom operators and their gradients.

Each public function is one custom operator (`torch.library.custom_op`), so that a small batch crosses the operator
boundary once, `torch.compile` sees one node, and the kernels run as they are in every mode.

Saved for the backward pass: the input, every layer's output (the next layer's input) and one number per row and layer,
the reciprocal deviation of its LayerNorm. Everything else is recomputed: the normalised rows are read off the outputs,
or, for a layer whose norm parameters make that inaccurate, by running the layer again (decided on the device).
There are no second derivatives; the eager implementation has them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from goal_kernels.dilated_conv import triton_passes as passes


def dilated_causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, dilation: int) -> Tensor:
    """See `goal_kernels.dilated_causal_conv`."""
    return _conv(x, weight, bias, dilation)


def causal_conv_block(
    x: Tensor, weight: Tensor, bias: Tensor, norm_weight: Tensor, norm_bias: Tensor, dilation: int, eps: float
) -> Tensor:
    """See `goal_kernels.causal_conv_block`: a stack of one."""
    return causal_conv_stack(x, weight[None], bias[None], norm_weight[None], norm_bias[None], (dilation,), eps)


def causal_conv_stack(
    x: Tensor,
    weights: Tensor,
    biases: Tensor,
    norm_weights: Tensor,
    norm_biases: Tensor,
    dilations: Sequence[int],
    eps: float,
) -> Tensor:
    """See `goal_kernels.causal_conv_stack`."""
    tensors = (x, weights, biases, norm_weights, norm_biases)
    keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return _stack(*tensors, list(dilations), eps, keep)[0]


@torch.library.custom_op("goal_kernels::dilated_causal_conv", mutates_args=())
def _conv(x: Tensor, weight: Tensor, bias: Tensor | None, dilation: int) -> Tensor:
    return passes.conv(x, weight, bias, dilation)


@_conv.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, dilation: int) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1], weight.shape[2])


@torch.library.custom_op("goal_kernels::dilated_causal_conv_backward", mutates_args=())
def _conv_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, dilation: int
) -> tuple[Tensor, Tensor, Tensor]:
    return passes.conv_backward(grad, x, weight, bias, dilation)


@_conv_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, dilation: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape),
        weight.new_empty(weight.shape),
        x.new_empty(0) if bias is None else bias.new_empty(bias.shape),
    )


def _conv_save(ctx, inputs, output) -> None:
    x, weight, bias, ctx.dilation = inputs
    ctx.save_for_backward(x, weight, bias)


def _conv_gradients(ctx, grad):
    x, weight, bias = ctx.saved_tensors
    grad_x, grad_weight, grad_bias = _conv_backward(grad, x, weight, bias, ctx.dilation)
    return grad_x, grad_weight, None if bias is None else grad_bias, None


_conv.register_autograd(_conv_gradients, setup_context=_conv_save)


@torch.library.custom_op("goal_kernels::causal_conv_stack", mutates_args=())
def _stack(
    x: Tensor,
    weights: Tensor,
    biases: Tensor,
    norm_weights: Tensor,
    norm_biases: Tensor,
    dilations: Sequence[int],
    eps: float,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The stack's output and, where `keep`, what the backward pass needs: hidden (J-1, B, L, D) and rstd (J, B, L)."""
    return passes.stack(x, weights, biases, norm_weights, norm_biases, dilations, eps, keep)


@_stack.register_fake
def _(
    x: Tensor,
    weights: Tensor,
    biases: Tensor,
    norm_weights: Tensor,
    norm_biases: Tensor,
    dilations: Sequence[int],
    eps: float,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    kept = len(dilations) if keep else 0
    return (
        x.new_empty(x.shape),
        x.new_empty(max(kept - 1, 0), *x.shape),
        x.new_empty(kept, *x.shape[:2], dtype=torch.float32),
    )


@torch.library.custom_op("goal_kernels::causal_conv_stack_backward", mutates_args=())
def _stack_backward(
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
    return passes.stack_backward(grad, x, hidden, out, rstd, weights, biases, norm_weights, norm_biases, dilations, eps)


@_stack_backward.register_fake
def _(
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
    return (
        x.new_empty(x.shape),
        weights.new_empty(weights.shape),
        biases.new_empty(biases.shape),
        norm_weights.new_empty(norm_weights.shape),
        norm_biases.new_empty(norm_biases.shape),
    )


def _stack_save(ctx, inputs, output) -> None:
    x, weights, biases, norm_weights, norm_biases, ctx.dilations, ctx.eps, _ = inputs
    out, hidden, rstd = output
    ctx.save_for_backward(x, hidden, out, rstd, weights, biases, norm_weights, norm_biases)
    ctx.set_materialize_grads(False)


def _stack_gradients(ctx, grad, grad_hidden, grad_rstd):
    if grad is None:
        return (None,) * 8
    return *_stack_backward(grad, *ctx.saved_tensors, ctx.dilations, ctx.eps), None, None, None


_stack.register_autograd(_stack_gradients, setup_context=_stack_save)
