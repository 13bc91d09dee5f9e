"""Launches of the backward pass, in order: memory, grids and tiles. Tensors are contiguous except the condition."""

# Triton's launch syntax, kernel[grid](...), takes plain values for constexpr parameters, and options besides:
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goal_kernels import _launch
from goal_kernels._launch import most_registers, multiprocessors
from goal_kernels.routed_experts import _mlp, _router
from goal_kernels.routed_experts._launches import grouped_matmul, matrix_options
from goal_kernels.routed_experts._plan import Plan, aligned, power, precision, tanh_kind

# Tokens of one group that one program of the condition's backward adds up; longer groups are summed by torch first.
LONGEST_GROUP = 1024


def backward(z, parameters, routing, upstream, upstreams, gradients, activation: str, shape: Plan) -> None:
    """Gradients of z, condition, gate_weight, w1, b1, w2 and b2 into `gradients`."""
    condition, gate_weight, w1, b1, w2, b2 = parameters
    weights, experts, _, dispatch = routing
    unaligned = not aligned(shape.channels, shape.hidden)
    capability = _launch.capability(z.device)
    older = capability < 90  # 4 warps spill there
    # Blackwell reads its two accumulators back: 128 columns of both beside the activation and its slope spill
    block = min(32 if shape.small else 64 if capability >= 100 else 128, power(shape.hidden))
    blocks = triton.cdiv(shape.hidden, block)
    scaled, slopes = (z.new_empty(shape.positions, shape.hidden) for _ in range(2))
    share_gradient = z.new_empty(shape.positions, blocks, dtype=torch.float32)
    by_position = (z, upstream)
    if shape.dense:
        share = z.new_empty(shape.positions, dtype=torch.float32)
    else:
        share = dispatch[shape.shares_start :][: shape.positions].view(torch.float32)
        by_position = tuple(z.new_empty(shape.positions, shape.channels) for _ in range(2))
    _mlp.hidden_backward_kernel[(shape.tiles * blocks,)](
        z,
        upstream,
        w1,
        b1,
        w2,
        b2,
        weights,
        experts,
        dispatch,
        scaled,
        slopes,
        share_gradient,
        share,
        *by_position,
        shape.tokens,
        shape.padded_tokens,
        shape.positions,
        shape.channels,
        shape.hidden,
        shape.experts,
        K=shape.k,
        DENSE=shape.dense,
        BM=shape.rows,
        BH=block,
        BK=min(shape.depth, power(shape.channels)),
        ACTIVATION=activation,
        TANH=tanh_kind(z.dtype),
        num_warps=4 if shape.rows < 128 and block <= 64 and not unaligned and not older else 8,
        num_stages=2 if shape.small else 3,
        **matrix_options(z),
    )
    copies = z.new_empty(shape.positions, shape.channels)
    grouped_matmul(slopes, w1, None, weights, experts, dispatch, copies, shape, transpose=True)
    weight_gradients(by_position, scaled, slopes, share, dispatch, gradients[3:], shape)
    gate_backward(z, condition, gate_weight, routing, upstreams, (copies, share_gradient), gradients[:3], shape)


def weight_gradients(by_position, scaled, slopes, share, dispatch, gradients, shape: Plan) -> None:
    z = by_position[0]
    largest = 64 if shape.small else 128
    channel_block, hidden_block = min(largest, power(shape.channels)), min(largest, power(shape.hidden))
    programs = 2 * shape.experts * triton.cdiv(shape.channels, channel_block) * triton.cdiv(shape.hidden, hidden_block)
    step = min(shape.depth, shape.rows)
    # Few tiles of weights leave most of the card idle: share out the rows, and add the parts up afterwards.
    rows = shape.padded_tokens if shape.dense else shape.positions // shape.experts
    split = 1
    while split < 8 and programs * split * 2 <= multiprocessors(z.device) * 2 and rows >= split * 4 * step:
        split *= 2
    outputs = gradients
    if split > 1:
        outputs = tuple(gradient.new_empty(split, *gradient.shape, dtype=torch.float32) for gradient in gradients)
    _mlp.weight_gradient_kernel[(programs * split,)](
        *by_position,
        scaled,
        slopes,
        share,
        dispatch,
        *outputs,
        shape.tokens,
        shape.padded_tokens,
        shape.channels,
        shape.hidden,
        shape.experts,
        DENSE=shape.dense,
        SPLIT=split,
        BM=step,
        BD=channel_block,
        BH=hidden_block,
        num_warps=4 if shape.small else 8,
        num_stages=2 if shape.small else 3,
        **matrix_options(z),
    )
    if split > 1:
        matrix, hidden_bias, channel_bias = (gradients[i].numel() for i in (0, 1, 3))
        block = 1024
        grid = 2 * triton.cdiv(matrix, block) + triton.cdiv(hidden_bias, block) + triton.cdiv(channel_bias, block)
        _mlp.sum_kernel[(grid,)](
            *outputs, *gradients, matrix, hidden_bias, channel_bias, SPLIT=split, BLOCK=block, num_warps=4
        )


def gate_backward(z, condition, gate_weight, routing, upstreams, expert_parts, gradients, shape: Plan) -> None:
    """Gradients of z, condition and gate_weight. `expert_parts` None: there are no experts (`route_topk`)."""
    weights, experts, probabilities, dispatch = routing
    weights_upstream, probabilities_upstream = (None if part is None else part.contiguous() for part in upstreams)
    copies, share_gradient = (weights, weights) if expert_parts is None else expert_parts
    groups, condition_channels = condition.shape
    width = power(shape.experts)
    options = {"EP": width, "DOT": tl.float32, "PRECISION": precision(z.dtype), "num_stages": 2}
    # Many experts and unaligned rows take registers
    plain = aligned(shape.channels, condition_channels)
    rows, depth = 64 if width <= 64 else 16, max(1024 // width, 16) if plain else 16
    options["num_warps"] = 4 if width <= 32 and plain else 8
    # ptxas left alone spills 8 bytes for Blackwell
    options["maxnreg"] = most_registers(options["num_warps"]) if _launch.capability(z.device) >= 100 else None
    programs = triton.cdiv(shape.tokens, rows)
    blocks = 0 if expert_parts is None else share_gradient.shape[1]
    logits_gradient = torch.empty_like(probabilities)
    token_parts = probabilities.new_empty(programs, shape.experts, shape.channels)
    _router.gate_backward_kernel[(programs,)](
        z,
        gate_weight,
        probabilities,
        experts,
        dispatch,
        copies,
        share_gradient,
        weights if weights_upstream is None else weights_upstream,
        weights if probabilities_upstream is None else probabilities_upstream,
        gradients[0],
        logits_gradient,
        token_parts,
        shape.tokens,
        shape.padded_tokens,
        blocks,
        shape.channels,
        gate_weight.shape[1],
        shape.experts,
        K=shape.k,
        EXPERTS=expert_parts is not None,
        DENSE=shape.dense,
        WEIGHTS=weights_upstream is not None,
        PROBABILITIES=probabilities_upstream is not None,
        BLOCKS=min(16, power(blocks, 1)),
        BM=rows,
        BD=min(depth, power(shape.channels)),
        **options,
    )
    members = shape.tokens // groups
    if members > LONGEST_GROUP:
        logits_gradient = logits_gradient.view(groups, members, shape.experts).sum(dim=1)
        members = 1
    group_rows = 16 if groups <= 2048 else rows
    group_programs = triton.cdiv(groups, group_rows)
    condition_parts = probabilities.new_empty(group_programs, shape.experts, condition_channels)
    _router.condition_backward_kernel[(group_programs,)](
        condition,
        gate_weight,
        logits_gradient,
        gradients[1],
        condition_parts,
        groups,
        members,
        condition_channels,
        gate_weight.shape[1],
        shape.experts,
        *condition.stride(),
        BM=group_rows,
        BD=min(depth, power(condition_channels)),
        **options,
    )
    block = 64
    _router.gate_sum_kernel[(triton.cdiv(gate_weight.numel(), block),)](
        token_parts,
        condition_parts,
        gradients[2],
        programs,
        group_programs,
        shape.channels,
        condition_channels,
        shape.experts,
        BLOCK=block,
        PARTS=32,
        num_warps=4,
    )
