"""Which kernels run for a shape, and with which tiles: one small pinned table, no tuning at run time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from goal_kernels import _launch

# Up to this many (token, expert) pairs every expert sees every token: sorting costs launches that the wasted
# multiplications do not (at E 4, k 2: 4,096 tokens).
DENSE_PAIRS = 16384
# Up to this many tokens one launch does it all: a program that walks through the experts, skipping the idle ones.
SINGLE_TOKENS = 16
# Channels a fused expert holds on the chip; above, two grouped matmuls run instead.
FUSED_CHANNELS = 256
# Before Hopper the matrix unit takes its operands from registers, which leaves room for half.
FUSED_CHANNELS_BEFORE_HOPPER = 128
FUSED_CHANNELS_FP32, FUSED_CHANNELS_FP32_SINGLE = 64, 128  # in fp32, with tiles of 64 tokens and of 16
# Rows of a matrix that start on multiples of this many elements are loaded 16 bytes at a time. Others are loaded one
# element at a time, whose addresses take the registers that a fused expert needs: two matmuls in small tiles then.
ALIGNMENT = 16
# The router holds all experts of a tile of tokens in registers.
MAX_EXPERTS = 256
# Pairs and positions are int32.
MAX_PAIRS = 2**31 - 2**24


@dataclass(frozen=True)
class Plan:
    """Layout and tiles for one call.

    Attributes:
        dense: every expert sees every token (no sorting), else tokens sorted by expert.
        single: one launch forward.
        fused: forward keeps the hidden layer on the chip.
        small: small tiles of the matmuls: fp32, whose products take three passes, or unaligned rows.
        rows: tokens a tile; every expert's rows are padded to a multiple of it.
        depth: channels (rows, for the gradients of weights) that a matmul outside the fused experts takes at once.
        padded_tokens: tokens rounded up to `rows` (dense layout: rows of one expert).
        positions: rows of the layout, padding included.
    """

    tokens: int
    channels: int
    hidden: int
    experts: int
    k: int
    dense: bool
    single: bool
    fused: bool
    small: bool
    rows: int
    depth: int
    padded_tokens: int
    positions: int

    @property
    def tiles(self) -> int:
        return self.positions // self.rows

    @property
    def dispatch_size(self) -> int:
        """Elements of the dispatch buffer (see _router.py); the dense layout has none."""
        return 0 if self.dense else self.shares_start + self.positions + self.tiles

    @property
    def shares_start(self) -> int:
        """Where the shares by position begin in the dispatch buffer."""
        return self.experts + 1 + self.tokens * self.k + self.positions


def plan(
    tokens: int, channels: int, hidden: int, experts: int, k: int, dtype: torch.dtype, device: torch.device
) -> Plan:
    """The plan of a shape on a card: a pure function of them, so that forward and backward agree."""
    wide = dtype == torch.float32
    capability = _launch.capability(device)
    older = capability < 90
    most = FUSED_CHANNELS_BEFORE_HOPPER if older else FUSED_CHANNELS
    if wide:
        most = FUSED_CHANNELS_FP32_SINGLE if tokens <= SINGLE_TOKENS else FUSED_CHANNELS_FP32
    straight = aligned(channels, hidden)
    fits = channels <= most and straight
    dense = fits and tokens * experts <= DENSE_PAIRS
    # In fp32 many tokens go through two matmuls: with the three products that fp32 takes, the fused expert spills.
    fused = fits and (dense or not wide)
    small = wide or not straight
    rows = 64 if small or older else 128
    # fp32's three products and the addresses of unaligned rows take registers: of aligned ones Hopper has enough for 32
    depth = 64 if not small else 32 if straight and capability == 90 else 16
    if dense and tokens <= 2048:
        rows = 16 if tokens <= 16 else 64
    padded = -(-tokens // rows) * rows
    positions = experts * padded if dense else (-(-tokens * k // rows) + experts) * rows
    single = dense and tokens <= SINGLE_TOKENS
    return Plan(tokens, channels, hidden, experts, k, dense, single, fused, small, rows, depth, padded, positions)


def aligned(*lengths: int) -> bool:
    """Whether rows of these lengths start on multiples of `ALIGNMENT`."""
    return all(length % ALIGNMENT == 0 for length in lengths)


def power(value: int, least: int = 16) -> int:
    """Next power of two, at least the smallest side of a matrix instruction."""
    return int(max(least, triton.next_power_of_2(max(value, 1))))


def dot_type(*tensors: Tensor) -> tl.dtype:
    """Type of a matmul's operands: the common 16-bit one, else fp32. The interpreter's 16-bit products are wrong."""
    kinds = {tensor.dtype for tensor in tensors}
    if _launch.INTERPRETING or len(kinds) > 1:
        return tl.float32
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(kinds.pop(), tl.float32)


def precision(dtype: torch.dtype) -> str:
    """fp32 operands in three tf32 products, accurate to 1e-6; 16-bit operands ignore it."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def tanh_kind(dtype: torch.dtype) -> str:
    """See _activation.py."""
    if _launch.INTERPRETING:
        return "exact"
    return {torch.bfloat16: "half", torch.float16: "fast"}.get(dtype, "exact")
