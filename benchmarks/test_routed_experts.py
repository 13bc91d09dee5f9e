"""Routed experts against what one would write first, on whatever device is there.

    pytest benchmarks/test_routed_experts.py

Small shapes: on CPU this compares the eager implementation; on a GPU the kernels. The table of the large shapes is
`benchmarks/gpu/experts.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from goal_kernels import routed_experts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHOSEN = 2
# decoding few users, and a training batch: tokens, channels, hidden, experts
SHAPES = [(64, 64, 128, 4), (4000, 64, 128, 4)]


def ours(*tensors: Tensor) -> Tensor:
    return routed_experts(*tensors, k=CHOSEN)[0]


def route(z: Tensor, condition: Tensor, gate_weight: Tensor) -> tuple[Tensor, Tensor]:
    joined = torch.cat([z, condition.repeat_interleave(z.shape[0] // condition.shape[0], 0)], -1)
    weights, experts = (joined @ gate_weight.T).softmax(-1).topk(CHOSEN)
    return weights / weights.sum(-1, keepdim=True), experts


def loop(z, condition, gate_weight, w1, b1, w2, b2) -> Tensor:
    weights, experts = route(z, condition, gate_weight)
    out = torch.zeros_like(z)
    for expert in range(w1.shape[0]):
        rows, slots = (experts == expert).nonzero(as_tuple=True)
        values = F.gelu(z[rows] @ w1[expert] + b1[expert], approximate="tanh") @ w2[expert] + b2[expert]
        out = out.index_add(0, rows, values * weights[rows, slots, None])
    return out


def dense(z, condition, gate_weight, w1, b1, w2, b2) -> Tensor:
    weights, experts = route(z, condition, gate_weight)
    combine = torch.zeros(z.shape[0], w1.shape[0], device=z.device).scatter(1, experts, weights)
    hidden = F.gelu(torch.baddbmm(b1[:, None], z.expand(w1.shape[0], *z.shape), w1), approximate="tanh")
    return (torch.baddbmm(b2[:, None], hidden, w2) * combine.T[:, :, None]).sum(0)


CONTESTANTS = {"ours": ours, "loop": loop, "dense": dense}


@pytest.mark.parametrize("contestant", CONTESTANTS)
@pytest.mark.parametrize("work", ["forward", "forward+backward"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_experts(benchmark, shape: tuple[int, int, int, int], work: str, contestant: str) -> None:
    benchmark.group = f"experts {work} {shape} {DEVICE}"
    tokens, channels, hidden, experts = shape
    torch.manual_seed(0)
    sizes = (
        (tokens, channels),
        (tokens // 8, channels),
        (experts, 2 * channels),
        (experts, channels, hidden),
        (experts, hidden),
        (experts, hidden, channels),
        (experts, channels),
    )
    tensors = [(torch.randn(size, device=DEVICE) * size[-1] ** -0.5).requires_grad_() for size in sizes]
    upstream = torch.randn(tokens, channels, device=DEVICE)
    function: Callable[..., Tensor] = CONTESTANTS[contestant]
    torch.testing.assert_close(function(*tensors), dense(*tensors), atol=1e-4, rtol=1e-4)

    def forward() -> None:
        with torch.no_grad():
            function(*tensors)

    def both() -> None:
        torch.autograd.grad(function(*tensors), tensors, upstream)

    def run() -> None:
        (forward if work == "forward" else both)()
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    benchmark.pedantic(run, rounds=10, warmup_rounds=2)
