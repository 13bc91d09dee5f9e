"""Launches of the forward pass, in order: memory, grids and tiles. Tensors are contiguous except the condition."""

# Triton's launch syntax, kernel[grid](...), takes plain values for constexpr parameters, and options besides:
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from goal_kernels import _launch
from goal_kernels._launch import most_registers
from goal_kernels.routed_experts import _mlp, _router
from goal_kernels.routed_experts._plan import Plan, aligned, dot_type, power, precision, tanh_kind

ROUTER_TOKENS = 64  # of a router program: 512 programs at 32,768 tokens, four a multiprocessor
# About two programs for each multiprocessor of an H100.
MIXTURE_PROGRAMS = 264
MIXTURE_TILE = 128 * 128  # elements of a tile of tokens beside which another, or the router's work, has room
MAX_ROUTER_PROGRAMS = 1024  # every program of the sort reads the counts of all of them


def router_block(tokens: int) -> tuple[int, int]:
    """Tokens of a router program, and programs."""
    block = ROUTER_TOKENS
    while tokens > block * MAX_ROUTER_PROGRAMS:
        block *= 2
    return block, -(-tokens // block)


def router_tiles(width: int, dot: tl.dtype, plain: bool) -> dict[str, int]:
    """Tokens and channels a router takes at once: pinned, by experts (a power of two) and type of its products.

    Many experts, rows that are not `plain` (aligned) and fp32's three products take registers.
    """
    if width > 64 or not plain:
        return {"BM": 16, "BD": 16, "num_warps": 8, "maxnreg": most_registers(8)}
    if dot == tl.float32:
        return {"BM": 32, "BD": 32, "num_warps": 4, "maxnreg": most_registers(4)}
    return {"BM": 64, "BD": 64, "num_warps": 8}


def route(
    z: Tensor,
    condition: Tensor,
    gate_weight: Tensor,
    routing: tuple[Tensor, Tensor, Tensor],
    shape: Plan,
    dispatch: Tensor,
) -> None:
    """Launch the router and, for the sorted layout, the sort."""
    weights, experts, probabilities = routing
    block, programs = router_block(shape.tokens)
    counts = z.new_empty(programs, shape.experts, dtype=torch.int32)
    sort = dispatch.numel() > 0
    width, dot = power(shape.experts), dot_type(z, condition, gate_weight)
    tiles = router_tiles(width, dot, aligned(shape.channels, condition.shape[1]))
    _router.router_kernel[(programs,)](
        z,
        condition,
        gate_weight,
        probabilities,
        weights,
        experts,
        dispatch[shape.experts + 1 :],
        counts,
        shape.tokens,
        shape.tokens // condition.shape[0],
        shape.channels,
        condition.shape[1],
        shape.experts,
        *condition.stride(),
        K=shape.k,
        EP=width,
        STEPS=block // tiles["BM"],
        SORT=sort,
        DOT=dot,
        PRECISION="tf32x3",
        num_stages=2,
        **tiles,
    )
    if sort:
        _router.sort_kernel[(programs + shape.experts + 1,)](
            experts,
            weights,
            dispatch,
            counts,
            shape.tokens * shape.k,
            programs,
            shape.positions,
            shape.experts,
            K=shape.k,
            EP=width,
            TILE=shape.rows,
            PAIRS=block * shape.k,
            CHUNK=min(power(block * shape.k), 256, 16384 // width),
            BLOCKS=max(1, 4096 // width),
            num_warps=4,
        )


def matrix_options(z: Tensor) -> dict[str, object]:
    return {"DOT": dot_type(z), "PRECISION": precision(z.dtype)}


def dense_forward(z, condition, gate_weight, w1, b1, w2, b2, activation, out, routing, shape: Plan) -> None:
    split, router = hidden_split(shape), dot_type(z, condition, gate_weight)
    copies = out if shape.single else z.new_empty(split * shape.positions, shape.channels)
    _mlp.mixture_kernel[(shape.padded_tokens // shape.rows * (1 if shape.single else split * shape.experts),)](
        z,
        condition,
        gate_weight,
        w1,
        b1,
        w2,
        b2,
        copies,
        routing[2],
        routing[0],
        routing[1],
        shape.tokens,
        shape.tokens // condition.shape[0],
        shape.padded_tokens,
        shape.channels,
        condition.shape[1],
        shape.hidden,
        shape.experts,
        *condition.stride(),
        K=shape.k,
        EP=power(shape.experts),
        SINGLE=shape.single,
        SPLIT=split,
        BM=shape.rows,
        BD=32,
        ACTIVATION=activation,
        TANH=tanh_kind(z.dtype),
        ROUTER=router,
        ROUTER_PRECISION="tf32x3",
        RESIDENT=router_shares_tile(shape, z, router),
        **(mixture_tiles(shape, z, activation) if split > 1 else fused_tiles(shape, z)),
        **matrix_options(z),
    )
    if not shape.single:
        combine(copies, out, out.new_empty(0, dtype=torch.int32), shape, split)


def hidden_split(shape: Plan) -> int:
    """Programs that share an expert's hidden channels in the dense layout: two where one each would leave a card's
    multiprocessors with a single program, or none. Of a wide tile there is only one a multiprocessor anyway."""
    programs = shape.padded_tokens // shape.rows * shape.experts
    fits = 2 * programs <= MIXTURE_PROGRAMS and shape.rows * power(shape.channels) <= MIXTURE_TILE
    return 2 if not shape.single and fits and shape.hidden >= 256 else 1


def sorted_forward(z, w1, b1, w2, b2, activation, out, weights, dispatch, shape: Plan) -> None:
    copies = z.new_empty(shape.positions, shape.channels)
    if shape.fused:
        tiles = fused_tiles(shape, z)
        width, block = tiles["DP"], tiles["BH"]
        descriptors = shape.channels == width and shape.hidden % block == 0
        if descriptors:  # the copy engine loads the weights: it wants whole blocks, or it would read the next expert
            w1 = TensorDescriptor.from_tensor(w1.view(-1, shape.hidden), [width, block])
            w2 = TensorDescriptor.from_tensor(w2.view(-1, shape.channels), [block, width])
        _mlp.experts_kernel[(shape.tiles,)](
            z,
            w1,
            b1,
            w2,
            b2,
            dispatch,
            copies,
            shape.tokens,
            shape.positions,
            shape.channels,
            shape.hidden,
            shape.experts,
            K=shape.k,
            DESCRIPTORS=descriptors,
            BM=shape.rows,
            ACTIVATION=activation,
            TANH=tanh_kind(z.dtype),
            **tiles,
            **matrix_options(z),
        )
    else:
        hidden = z.new_empty(shape.positions, shape.hidden)
        grouped_matmul(z, w1, b1, weights, weights, dispatch, hidden, shape, gather=True, activation=activation)
        grouped_matmul(hidden, w2, b2, weights, weights, dispatch, copies, shape, share=True)
    combine(copies, out, dispatch, shape)


def fused_tiles(shape: Plan, z: Tensor) -> dict[str, int]:
    """Tiles of a fused expert: pinned, the output of a tile of tokens stays in registers."""
    width = power(shape.channels)
    if z.dtype == torch.float32:
        return {"DP": width, "BH": 32 if width <= 64 else 16, "num_warps": 8, "num_stages": 1}
    # Before Hopper tokens come from registers: on 4 warps 64 rows of 64 channels spill with Triton 3.6
    light = width <= (128 if shape.rows <= 16 else 64 if _launch.capability(z.device) >= 90 else 32)
    tiles = {"DP": width, "BH": 64, "num_warps": 4 if light else 8, "num_stages": 2}
    if _launch.capability(z.device) >= 100:  # ptxas left alone spills 8 bytes there
        tiles["maxnreg"] = most_registers(tiles["num_warps"])
    return tiles


def router_shares_tile(shape: Plan, z: Tensor, router: tl.dtype) -> bool:
    """Whether the router of the dense layout multiplies the experts' tile: of the same type, and not a wide one or in
    fp32, which would take registers."""
    small = shape.rows * power(shape.channels) <= MIXTURE_TILE and router != tl.float32
    return router == dot_type(z) and (small or _launch.INTERPRETING)


def mixture_tiles(shape: Plan, z: Tensor, activation: str) -> dict[str, int]:
    """Tiles of a program that has half of an expert's hidden channels: on Hopper so few registers that two fit a
    multiprocessor. The erf of "gelu" takes more."""
    tiles = fused_tiles(shape, z)
    if shape.rows == 128 and tiles["DP"] == 128 and activation != "gelu" and _launch.capability(z.device) == 90:
        return tiles | {"BH": 32, "maxnreg": 128}
    return tiles


def grouped_matmul(
    values: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    weights: Tensor,
    experts_of: Tensor,
    dispatch: Tensor,
    out: Tensor,
    shape: Plan,
    *,
    transpose: bool = False,
    gather: bool = False,
    share: bool = False,
    activation: str = "none",
) -> None:
    """`out[position] = values @ matrix[expert]`, the matrix transposed where asked."""
    depth, width = (matrix.shape[2], matrix.shape[1]) if transpose else (matrix.shape[1], matrix.shape[2])
    strides = (1, matrix.shape[2]) if transpose else (matrix.shape[2], 1)
    columns = min(64 if shape.small or shape.rows < 64 else 128, power(width))
    _mlp.grouped_matmul_kernel[(shape.tiles * triton.cdiv(width, columns),)](
        values,
        matrix,
        matrix if bias is None else bias,
        weights,
        experts_of,
        dispatch,
        out,
        shape.tokens,
        shape.padded_tokens,
        shape.positions,
        depth,
        width,
        shape.experts,
        *strides,
        K=shape.k,
        GATHER=gather,
        SHARE=share,
        BIAS=bias is not None,
        ACTIVATION=activation,
        TANH=tanh_kind(values.dtype),
        DENSE=shape.dense,
        BM=shape.rows,
        BN=columns,
        BK=shape.depth,
        num_warps=4 if shape.rows < 128 else 8,
        num_stages=2 if shape.small else 3,
        **matrix_options(values),
    )


def combine(copies: Tensor, out: Tensor, dispatch: Tensor, shape: Plan, split: int = 1) -> None:
    width = min(256, power(shape.channels))
    rows = max(1, 2048 // width)
    _router.combine_kernel[(triton.cdiv(shape.tokens, rows),)](
        copies,
        dispatch,
        out,
        shape.tokens,
        shape.padded_tokens,
        shape.channels,
        shape.experts,
        K=shape.k,
        SLOTS=split * shape.experts if shape.dense else shape.k,
        DENSE=shape.dense,
        BM=rows,
        BD=width,
        num_warps=4,
    )
