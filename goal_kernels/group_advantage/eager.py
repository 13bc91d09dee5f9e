"""Group advantage in plain torch: the truth the kernel is tested against, and the path of CPU tensors.

Shapes: S states, n multipliers, m candidates.
fp16 and bf16 are computed in fp32 inside, fp32 in fp32, fp64 in fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from goal_kernels._precision import compute_dtype

# Rewards that are equal on paper differ by the rounding of reward, multiplier*cost and their difference: together at
# most 1.5 units in the last place of the largest of them. A spread within this many units is no spread at all;
# divided by its own std it would turn rounding into advantages of order one.
RESIDUE_UNITS = 2.0


def group_advantage(
    reward: Tensor, cost: Tensor, multipliers: Tensor, *, eps: float = 1e-6, std_floor: float = 0.0
) -> Tensor:
    """Eager `goal_kernels.group_advantage`."""
    dtype = compute_dtype(reward.dtype)
    with torch.no_grad():
        reward, penalty = reward.to(dtype), multipliers.to(dtype)[:, None] * cost.to(dtype)
        if reward.shape[-1] == 0:
            return torch.zeros_like(reward)
        value = reward - penalty
        valid = value.isfinite()
        magnitude = torch.maximum(reward.abs(), penalty.abs())
        magnitude = torch.where(valid, magnitude, 0.0).amax(dim=-1, keepdim=True)
        # Measuring from the group's lowest value makes equal rewards exactly zero, whatever the sum's rounding.
        lowest = torch.where(valid, value, torch.inf).amin(dim=-1, keepdim=True)
        above = torch.where(valid, value - lowest, 0.0)
        count = valid.sum(dim=-1, keepdim=True).clamp(min=1)
        deviation = above - above.sum(dim=-1, keepdim=True) / count
        deviation = torch.where(valid, deviation, 0.0)
        std = (deviation.square().sum(dim=-1, keepdim=True) / count).sqrt()
        advantage = deviation / (std.clamp(min=std_floor) + eps)
        equal = above.amax(dim=-1, keepdim=True) <= RESIDUE_UNITS * torch.finfo(dtype).eps * magnitude
        return torch.where(equal, 0.0, advantage)
