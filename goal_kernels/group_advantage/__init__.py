"""Advantages normalised within one (state, multiplier) group: Algorithm 3 of the paper."""

from __future__ import annotations

from torch import Tensor

from goal_kernels._checks import check_number, check_same_device, check_shape, check_tensor
from goal_kernels.backend import backend_for, fall_back
from goal_kernels.group_advantage import eager

__all__ = ["group_advantage"]


def group_advantage(
    reward: Tensor, cost: Tensor, multipliers: Tensor, *, eps: float = 1e-6, std_floor: float = 0.0
) -> Tensor:
    """How much better a candidate is than the others of its state under the same multiplier, in standard deviations.

    With r = reward - multiplier * cost: `(r - mean_m r) / (max(std_m r, std_floor) + eps)`, std being the population's.
    A group whose r are equal, up to the rounding of that difference, gives exactly 0. Candidates whose r is NaN or
    infinite are left out of their group's statistics and get 0. Advantages are constants: no gradient flows.

    Legend: S states, n multipliers, m candidates.

    Args:
        reward: `(S, n, m)` floating, any strides (a broadcast view is read without a copy).
        cost: `(S, n, m)` floating, in the units the multipliers price.
        multipliers: `(n,)` floating, the Lagrange multipliers.
        eps: added to the standard deviation, above 0.
        std_floor: smallest standard deviation to divide by, in units of reward.

    Returns:
        `(S, n, m)` fp32 (fp64 for fp64 rewards).

    Raises:
        TypeError: an argument is not a floating tensor or not a number.
        ValueError: shapes or devices do not fit together, or eps or std_floor is out of range.

    Example:
        >>> import torch
        >>> reward, cost = torch.tensor([[[1.0, 3.0]]]), torch.tensor([[[0.0, 1.0]]])
        >>> group_advantage(reward, cost, torch.tensor([1.0])).round(decimals=3)
        tensor([[[-1.,  1.]]])

    Source: equation of the advantage and Algorithm 3 of the paper.
    """
    for argument, value in (("reward", reward), ("cost", cost), ("multipliers", multipliers)):
        check_tensor(argument, value)
    check_shape("reward", reward, (None, None, None), "(S, n, m)")
    check_shape("cost", cost, tuple(reward.shape), "the shape of reward")
    check_shape("multipliers", multipliers, (reward.shape[1],), "(n,)")
    check_same_device("reward", reward, cost=cost, multipliers=multipliers)
    check_number("eps", eps, minimum=0.0, exclusive=True)
    check_number("std_floor", std_floor, minimum=0.0)
    if backend_for(reward) == "triton":
        from goal_kernels.group_advantage import triton as kernels

        if kernels.supports(reward):
            return kernels.group_advantage(reward, cost, multipliers, eps=eps, std_floor=std_floor)
        fall_back("group_advantage", kernels.LIMITS)
    return eager.group_advantage(reward, cost, multipliers, eps=eps, std_floor=std_floor)
