"""Routed experts as custom ops: what is launched, in which order. See eager.py for the semantics, _plan.py for the
choice between the dense and the sorted layout, _router.py for that layout, _mlp.py for the experts and _launches*.py
for their launches.

Forward, few tokens: one launch (up to 16 tokens) or two (experts with the router in them; sum). Many: router, sort,
experts (two matmuls above 256 channels), sum. Backward: hidden layer, copies of z's gradient, weights, gate,
conditions, sum of the gate's parts, and for few tokens a sum of the weights' parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from goal_kernels._launch import on_device_of, packed, within_32_bits
from goal_kernels._precision import without_autocast
from goal_kernels.routed_experts import _launches, _launches_backward
from goal_kernels.routed_experts._plan import MAX_EXPERTS, MAX_PAIRS, plan
from goal_kernels.routed_experts.eager import Routing

LIMITS = f"16- and 32-bit floats, up to {MAX_EXPERTS} experts, tokens * experts below {MAX_PAIRS}, no empty layer"


def supports(z: Tensor, experts: int, k: int, hidden: int = 1) -> bool:
    """Whether the kernels can run, see `LIMITS`."""
    tokens, channels = z.shape
    few = experts <= MAX_EXPERTS and tokens * max(k, experts) < MAX_PAIRS
    return z.dtype != torch.float64 and few and channels > 0 and hidden > 0


def _empty_routing(z: Tensor, experts: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens = z.shape[0]
    return (
        z.new_empty(tokens, k, dtype=torch.float32),
        z.new_empty(tokens, k, dtype=torch.int64),
        z.new_empty(tokens, experts, dtype=torch.float32),
    )


@torch.library.custom_op("goal_kernels::route_topk", mutates_args=())
def route_op(z: Tensor, condition: Tensor, gate_weight: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    routing = _empty_routing(z, gate_weight.shape[0], k)
    if z.shape[0]:
        shape = plan(z.shape[0], z.shape[1], 1, gate_weight.shape[0], k, z.dtype, z.device)
        z, gate_weight = packed(z), packed(gate_weight)
        with on_device_of(z):
            _launches.route(z, within_32_bits(condition, 1), gate_weight, routing, shape, routing[1].new_empty(0).int())
    return routing


@route_op.register_fake
def _(z: Tensor, condition: Tensor, gate_weight: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_routing(z, gate_weight.shape[0], k)


@torch.library.custom_op("goal_kernels::routed_experts", mutates_args=())
def experts_op(
    z: Tensor,
    condition: Tensor,
    gate_weight: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    k: int,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output, routing, and the dispatch buffer that the backward pass goes by."""
    outputs = out, weights, experts, probabilities, dispatch = _outputs(z, gate_weight, w1, k)
    if z.shape[0] == 0:
        return outputs
    routing = weights, experts, probabilities
    shape = plan(z.shape[0], z.shape[1], w1.shape[2], gate_weight.shape[0], k, z.dtype, z.device)
    z, gate_weight, w1, b1, w2, b2 = (packed(tensor) for tensor in (z, gate_weight, w1, b1, w2, b2))
    condition = within_32_bits(condition, 1)
    with on_device_of(z):
        if shape.dense:
            _launches.dense_forward(z, condition, gate_weight, w1, b1, w2, b2, activation, out, routing, shape)
        else:
            _launches.route(z, condition, gate_weight, routing, shape, dispatch)
            _launches.sorted_forward(z, w1, b1, w2, b2, activation, out, routing[0], dispatch, shape)
    return outputs


def _outputs(z: Tensor, gate_weight: Tensor, w1: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    shape = plan(z.shape[0], z.shape[1], w1.shape[2], gate_weight.shape[0], k, z.dtype, z.device)
    dispatch = z.new_empty(shape.dispatch_size if z.shape[0] else 0, dtype=torch.int32)
    weights, experts, probabilities = _empty_routing(z, gate_weight.shape[0], k)
    return z.new_empty(z.shape), weights, experts, probabilities, dispatch


@experts_op.register_fake
def _(z, condition, gate_weight, w1, b1, w2, b2, k, activation):
    return _outputs(z, gate_weight, w1, k)


@torch.library.custom_op("goal_kernels::routed_experts_backward", mutates_args=())
def experts_backward_op(
    upstream: Tensor,
    weights_upstream: Tensor | None,
    probabilities_upstream: Tensor | None,
    z: Tensor,
    condition: Tensor,
    gate_weight: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    weights: Tensor,
    experts: Tensor,
    probabilities: Tensor,
    dispatch: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of z, condition, gate_weight, w1, b1, w2 and b2."""
    gradients = _like(z, condition, gate_weight, w1, b1, w2, b2)
    if z.shape[0] == 0:
        for gradient in gradients:
            gradient.zero_()
        return gradients
    shape = plan(z.shape[0], z.shape[1], w1.shape[2], gate_weight.shape[0], weights.shape[1], z.dtype, z.device)
    upstream, z, gate_weight, w1, b1, w2, b2 = (packed(tensor) for tensor in (upstream, z, gate_weight, w1, b1, w2, b2))
    with on_device_of(z), without_autocast(z.device.type):
        parameters = (within_32_bits(condition, 1), gate_weight, w1, b1, w2, b2)
        routing = (weights, experts, probabilities, dispatch)
        upstreams = (weights_upstream, probabilities_upstream)
        _launches_backward.backward(z, parameters, routing, upstream, upstreams, gradients, activation, shape)
    return gradients


def _like(*tensors: Tensor) -> Any:
    """Unwritten gradients; `Any`, since a custom op names the length of its tuple."""
    return tuple(tensor.new_empty(tensor.shape) for tensor in tensors)


@experts_backward_op.register_fake
def _(upstream, weights_upstream, probabilities_upstream, z, condition, gate_weight, w1, b1, w2, b2, *_):
    return _like(z, condition, gate_weight, w1, b1, w2, b2)


@torch.library.custom_op("goal_kernels::route_topk_backward", mutates_args=())
def route_backward_op(
    weights_upstream: Tensor | None,
    probabilities_upstream: Tensor | None,
    z: Tensor,
    condition: Tensor,
    gate_weight: Tensor,
    weights: Tensor,
    experts: Tensor,
    probabilities: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of z, condition and gate_weight."""
    gradients = _like(z, condition, gate_weight)
    if z.shape[0] == 0:
        for gradient in gradients:
            gradient.zero_()
        return gradients
    shape = plan(z.shape[0], z.shape[1], 1, gate_weight.shape[0], weights.shape[1], z.dtype, z.device)
    z, condition, gate_weight = packed(z), within_32_bits(condition, 1), packed(gate_weight)
    upstreams = (weights_upstream, probabilities_upstream)
    routing = (weights, experts, probabilities, experts)
    with on_device_of(z), without_autocast(z.device.type):
        _launches_backward.gate_backward(z, condition, gate_weight, routing, upstreams, None, gradients, shape)
    return gradients


@route_backward_op.register_fake
def _(weights_upstream, probabilities_upstream, z, condition, gate_weight, *_):
    return _like(z, condition, gate_weight)


def _route_context(ctx, inputs, output) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3], *output)


def _route_backward(ctx, weights, experts, probabilities):
    return *route_backward_op(weights, probabilities, *ctx.saved_tensors), None


route_op.register_autograd(_route_backward, setup_context=_route_context)


def _experts_context(ctx, inputs, output) -> None:
    _, _, experts, _, dispatch = output
    ctx.mark_non_differentiable(experts, dispatch)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:7], *output[1:])
    ctx.activation = inputs[8]


def _experts_backward(ctx, upstream, weights, experts, probabilities, dispatch):
    saved = ctx.saved_tensors
    if upstream is None:
        upstream = torch.zeros_like(saved[0])
    return *experts_backward_op(upstream, weights, probabilities, *saved, ctx.activation), None, None


experts_op.register_autograd(_experts_backward, setup_context=_experts_context)


def route_topk(z: Tensor, condition: Tensor, gate_weight: Tensor, *, k: int) -> Routing:
    """Triton `goal_kernels.route_topk`."""
    return Routing(*route_op(z, condition, gate_weight, k))


def routed_experts(
    z: Tensor,
    condition: Tensor,
    gate_weight: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    *,
    k: int,
    activation: str,
) -> tuple[Tensor, Routing]:
    """Triton `goal_kernels.routed_experts`."""
    out, *routing, _ = experts_op(z, condition, gate_weight, w1, b1, w2, b2, k, activation)
    return out, Routing(*routing)
