"""Group advantage on a GPU: ours against plain torch, compiled, and each as a graph.

python benchmarks/gpu/advantage.py --out runs/gpu_check
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from measuring import Row, main, relative_error
from torch import Tensor

from goal_kernels import group_advantage
from goal_kernels.group_advantage import eager

STATES, MULTIPLIERS, CANDIDATES = 65536, 7, 16
FLOOR, GOAL = 0.0195, 0.0215 / 0.0244  # H100


def arguments() -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (STATES, MULTIPLIERS, CANDIDATES)
    reward = torch.randn(shape, generator=generator, device="cuda")
    cost = torch.rand(shape, generator=generator, device="cuda")
    return [reward, cost, torch.linspace(0, 3, MULTIPLIERS, device="cuda")]


def plain(reward: Tensor, cost: Tensor, multipliers: Tensor) -> Tensor:
    """What one would write: no missing rewards, equal ones divided by eps."""
    value = reward - multipliers[:, None] * cost
    std, mean = torch.std_mean(value, dim=-1, correction=0, keepdim=True)
    return (value - mean) / (std + 1e-6)


def errors() -> dict[str, float]:
    """Relative error against fp64."""
    tensors = arguments()
    exact = eager.group_advantage(*(tensor.double() for tensor in tensors))
    return {"advantage": relative_error(group_advantage(*tensors), exact)}


def prepare() -> tuple[dict[str, Callable[[], object]], dict[str, Callable[[], object]]]:
    """Functions to time."""
    tensors = arguments()
    torch.compiler.reset()
    peers = {
        "torch": plain,
        "compiled": torch.compile(plain),
        "eager": eager.group_advantage,
        "compiled eager": torch.compile(eager.group_advantage),
    }
    timed = {name: partial(function, *tensors) for name, function in peers.items()}
    return {"ours": partial(group_advantage, *tensors)}, timed


def rows() -> list[Row]:
    """The table's row."""
    name = f"group advantage {STATES}x{MULTIPLIERS}x{CANDIDATES}"
    return [Row(name, torch.float32, FLOOR, {"any": GOAL}, errors, prepare)]


if __name__ == "__main__":
    main(rows(), "advantage")
