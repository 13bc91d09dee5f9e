"""Group advantage in one pass: each program holds whole groups in registers. See eager.py for the semantics."""

# Triton's launch syntax, kernel[grid](...), takes plain values for constexpr parameters, and options besides:
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from goal_kernels._launch import on_device_of
from goal_kernels.group_advantage.eager import RESIDUE_UNITS

# A group is one row of a tile; above this many candidates the row no longer fits in registers.
MAX_CANDIDATES = 8192
TILE = 1024  # elements a program: 8 a thread, which 16 candidates hold in 36 registers, 12 programs a multiprocessor
RESIDUE = tl.constexpr(RESIDUE_UNITS * torch.finfo(torch.float32).eps)


LIMITS = f"16- and 32-bit floats, up to {MAX_CANDIDATES} candidates a group"


def supports(reward: Tensor) -> bool:
    """Whether the kernel can run, see `LIMITS`."""
    return reward.dtype != torch.float64 and reward.shape[2] <= MAX_CANDIDATES


@triton.jit(do_not_specialize=["groups"])
def group_advantage_kernel(
    reward,
    cost,
    multipliers,
    out,
    groups,
    conditions,
    candidates,
    reward_s,
    reward_n,
    reward_m,
    cost_s,
    cost_n,
    cost_m,
    multipliers_n,
    eps,
    std_floor,
    CONTIGUOUS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # `groups` is an int64 only where it must be: a division in 64 bits is a call, around which registers spill
    first = tl.program_id(0).to(groups.dtype) * ROWS
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < groups - first)[:, None] & (column < candidates)
    group = (first % conditions).to(tl.int32) + row  # from the first condition of the first group's state on
    condition = group % conditions
    base = first.to(tl.int64) * candidates
    local = row[:, None] * candidates + column
    if CONTIGUOUS:
        # Read once: nothing is worth keeping in the caches
        rewards = tl.load(reward + base + local, inside, other=0.0, eviction_policy="evict_first")
        costs = tl.load(cost + base + local, inside, other=0.0, eviction_policy="evict_first")
    else:
        state = ((first // conditions).to(tl.int64) + group // conditions)[:, None]
        which = condition.to(tl.int64)[:, None]
        far = column.to(tl.int64)
        rewards = tl.load(reward + state * reward_s + which * reward_n + far * reward_m, inside, other=0.0)
        costs = tl.load(cost + state * cost_s + which * cost_n + far * cost_m, inside, other=0.0)
    price = tl.load(multipliers + condition.to(tl.int64) * multipliers_n, row < groups - first, other=0.0)
    rewards = rewards.to(tl.float32)
    penalty = price.to(tl.float32)[:, None] * costs.to(tl.float32)
    value = rewards - penalty
    # x - x is 0 for finite x only
    valid = inside & (value - value == 0.0)
    magnitude = tl.max(tl.where(valid, tl.maximum(tl.abs(rewards), tl.abs(penalty)), 0.0), axis=1)
    lowest = tl.min(tl.where(valid, value, float("inf")), axis=1)
    above = tl.where(valid, value - lowest[:, None], 0.0)
    count = tl.maximum(tl.sum(valid.to(tl.float32), axis=1), 1.0)
    mean = tl.sum(above, axis=1) / count
    deviation = tl.where(valid, above - mean[:, None], 0.0)
    std = tl.sqrt_rn(tl.sum(deviation * deviation, axis=1) / count)
    scale = 1.0 / (tl.maximum(std, std_floor) + eps)
    scale = tl.where(tl.max(above, axis=1) <= magnitude * RESIDUE, 0.0, scale)
    tl.store(out + base + local, deviation * scale[:, None], inside)


@torch.library.custom_op("goal_kernels::group_advantage", mutates_args=())
def group_advantage_op(reward: Tensor, cost: Tensor, multipliers: Tensor, eps: float, std_floor: float) -> Tensor:
    out = torch.empty(reward.shape, dtype=torch.float32, device=reward.device)
    if out.numel() == 0:
        return out
    states, conditions, candidates = reward.shape
    groups = states * conditions
    columns = triton.next_power_of_2(candidates)
    rows = max(1, TILE // columns)
    with on_device_of(reward):
        group_advantage_kernel[(triton.cdiv(groups, rows),)](
            reward,
            cost,
            multipliers,
            out,
            groups,
            conditions,
            candidates,
            *reward.stride(),
            *cost.stride(),
            multipliers.stride(0),
            eps,
            std_floor,
            CONTIGUOUS=reward.is_contiguous() and cost.is_contiguous(),
            ROWS=rows,
            COLUMNS=columns,
            num_warps=4 if columns <= TILE else 8,
        )
    return out


@group_advantage_op.register_fake
def _(reward: Tensor, cost: Tensor, multipliers: Tensor, eps: float, std_floor: float) -> Tensor:
    return reward.new_empty(reward.shape, dtype=torch.float32)


def group_advantage(reward: Tensor, cost: Tensor, multipliers: Tensor, *, eps: float, std_floor: float) -> Tensor:
    """Triton `goal_kernels.group_advantage`."""
    return group_advantage_op(reward.detach(), cost.detach(), multipliers.detach(), float(eps), float(std_floor))
