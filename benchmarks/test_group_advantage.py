"""Group advantage against what one would write first, on whatever device is there.

    pytest benchmarks/test_group_advantage.py

The table of the large shape is `benchmarks/gpu/advantage.py`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from goal_kernels import group_advantage

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# states, multipliers, candidates
SHAPES = [(256, 7, 16), (4096, 7, 16)]


def plain(reward: Tensor, cost: Tensor, multipliers: Tensor) -> Tensor:
    """No missing rewards, and equal ones divided by eps."""
    value = reward - multipliers[:, None] * cost
    std, mean = torch.std_mean(value, dim=-1, correction=0, keepdim=True)
    return (value - mean) / (std + 1e-6)


CONTESTANTS = {"ours": group_advantage, "plain": plain}


@pytest.mark.parametrize("contestant", CONTESTANTS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_advantage(benchmark, shape: tuple[int, int, int], contestant: str) -> None:
    benchmark.group = f"group advantage {shape} {DEVICE}"
    torch.manual_seed(0)
    tensors = (
        torch.randn(shape, device=DEVICE),
        torch.rand(shape, device=DEVICE),
        torch.linspace(0, 3, shape[1], device=DEVICE),
    )
    function = CONTESTANTS[contestant]
    torch.testing.assert_close(function(*tensors), plain(*tensors), atol=1e-4, rtol=1e-4)

    def run() -> None:
        function(*tensors)
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    benchmark.pedantic(run, rounds=10, warmup_rounds=2)
