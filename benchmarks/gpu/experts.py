"""Routed experts on a GPU: ours against a loop, a dense sum and torch._grouped_mm, also compiled and as graphs.

python benchmarks/gpu/experts.py --out runs/gpu_check
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from measuring import Row, main, relative_error, upstream_of
from torch import Tensor

from goal_kernels import routed_experts
from goal_kernels.routed_experts import eager

DTYPE = torch.bfloat16
CHOSEN = 2
TOKENS_PER_GROUP = 8
# tokens, channels, hidden, experts: floor and wanted ratios, forward and forward with backward (H100)
SHAPES = {
    (32768, 256, 1024, 8): ((0.09, {"any": 0.16 / 0.844}), (0.27, {"any": 0.60 / 2.38})),
    (4096, 128, 512, 4): (
        (0.003, {"any": 0.022 / 0.088}),
        (0.01, {"launched": 0.15 / 1.64, "graph": 0.08 / 1.64}),
    ),
}
# tokens compared with fp64: enough for every kind of tile, few enough for fp64's memory
COMPARED = 8192
NAMES = ("z", "condition", "gate_weight", "w1", "b1", "w2", "b2")
WAITING = frozenset({"loop"})  # for the device: how many tokens an expert has
Shape = tuple[int, int, int, int]


def arguments(shape: Shape) -> list[Tensor]:
    """z, condition, router and experts in bf16, biases in fp32, all needing gradients."""
    tokens, channels, hidden, experts = shape
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(size, generator=generator, device="cuda") * scale

    tensors = [
        random(tokens, channels).to(DTYPE),
        random(tokens // TOKENS_PER_GROUP, channels).to(DTYPE),
        random(experts, 2 * channels, scale=channels**-0.5).to(DTYPE),
        random(experts, channels, hidden, scale=channels**-0.5).to(DTYPE),
        random(experts, hidden, scale=0.1),
        random(experts, hidden, channels, scale=hidden**-0.5).to(DTYPE),
        random(experts, channels, scale=0.1),
    ]
    return [tensor.requires_grad_() for tensor in tensors]


def ours(*tensors: Tensor) -> Tensor:
    return routed_experts(*tensors, k=CHOSEN)[0]


def route(z: Tensor, condition: Tensor, gate_weight: Tensor) -> tuple[Tensor, Tensor]:
    """What one would write: the concatenation, a softmax in fp32 and topk."""
    joined = torch.cat([z, condition.repeat_interleave(TOKENS_PER_GROUP, 0)], -1)
    probabilities = (joined @ gate_weight.T).float().softmax(-1)
    weights, experts = probabilities.topk(CHOSEN)
    return weights / weights.sum(-1, keepdim=True), experts


def loop(z, condition, gate_weight, w1, b1, w2, b2) -> Tensor:
    """One expert after another on its own tokens."""
    weights, experts = route(z, condition, gate_weight)
    out = torch.zeros_like(z)
    for expert in range(w1.shape[0]):
        rows, slots = (experts == expert).nonzero(as_tuple=True)
        hidden = F.gelu(z[rows] @ w1[expert] + b1[expert].to(z.dtype), approximate="tanh")
        values = hidden @ w2[expert] + b2[expert].to(z.dtype)
        out = out.index_add(0, rows, values * weights[rows, slots, None].to(z.dtype))
    return out


def dense(z, condition, gate_weight, w1, b1, w2, b2) -> Tensor:
    """All experts on all tokens."""
    weights, experts = route(z, condition, gate_weight)
    combine = torch.zeros(z.shape[0], w1.shape[0], device=z.device).scatter(1, experts, weights).to(z.dtype)
    hidden = F.gelu(torch.baddbmm(b1[:, None].to(z.dtype), z.expand(w1.shape[0], *z.shape), w1), approximate="tanh")
    return (torch.baddbmm(b2[:, None].to(z.dtype), hidden, w2) * combine.T[:, :, None]).sum(0)


def grouped(z, condition, gate_weight, w1, b1, w2, b2) -> Tensor:
    """The library's grouped matmul over tokens sorted by expert."""
    weights, experts = route(z, condition, gate_weight)
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    ids = torch.arange(w1.shape[0], device=z.device)
    ends = (flat[:, None] == ids).sum(0).cumsum(0).to(torch.int32)
    chosen = flat[order]
    hidden = torch._grouped_mm(z[order // CHOSEN], w1, offs=ends) + b1[chosen].to(z.dtype)
    values = torch._grouped_mm(F.gelu(hidden, approximate="tanh"), w2, offs=ends) + b2[chosen].to(z.dtype)
    back = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=z.device))
    return (values[back].view(-1, CHOSEN, z.shape[1]) * weights[..., None].to(z.dtype)).sum(1)


def with_backward(function: Callable[..., Tensor], tensors: list[Tensor], upstream: Tensor) -> list[Tensor]:
    out = function(*tensors)
    return [out, *torch.autograd.grad(out, tensors, upstream)]


def forward_only(function: Callable[..., Tensor], tensors: list[Tensor]) -> Tensor:
    with torch.no_grad():
        return function(*tensors)


def errors(shape: Shape, backward: bool) -> dict[str, float]:
    """Relative errors against fp64 on the first tokens, of the output and, with backward, of all gradients."""
    tensors = arguments(shape)
    tokens = min(shape[0], COMPARED)
    tensors[0] = tensors[0].detach()[:tokens].requires_grad_()
    tensors[1] = tensors[1].detach()[: tokens // TOKENS_PER_GROUP].requires_grad_()
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]

    def truth(*values: Tensor) -> Tensor:
        return eager.routed_experts(*values, k=CHOSEN)[0]

    if not backward:
        return {"out": relative_error(forward_only(ours, tensors), forward_only(truth, exact))}
    upstream = upstream_of(tensors[0])
    values = with_backward(ours, tensors, upstream)
    wanted = with_backward(truth, exact, upstream.double())
    return {name: relative_error(*pair) for name, *pair in zip(("out", *NAMES), values, wanted, strict=True)}


def prepare(shape: Shape, backward: bool) -> tuple[dict[str, Callable[[], object]], dict[str, Callable[[], object]]]:
    """Functions to time."""
    tensors = arguments(shape)
    upstream = upstream_of(tensors[0])
    torch.compiler.reset()

    def timed(function: Callable[..., Tensor]) -> Callable[[], object]:
        if backward:
            return partial(with_backward, function, tensors, upstream)
        return partial(forward_only, function, tensors)

    peers = {"loop": loop, "dense": dense, "grouped": grouped}
    peers |= {f"compiled {name}": torch.compile(peers[name]) for name in ("dense", "grouped")}
    return {"ours": timed(ours)}, {name: timed(function) for name, function in peers.items()}


def rows() -> list[Row]:
    """The table's rows."""
    table = []
    for shape, limits in SHAPES.items():
        for backward, (floor, goals) in zip((False, True), limits, strict=True):
            tokens, channels, hidden, experts = shape
            work = "forward+backward" if backward else "forward"
            name = f"experts {work}, N{tokens} D{channels} H{hidden} E{experts} k{CHOSEN}"
            checks, functions = partial(errors, shape, backward), partial(prepare, shape, backward)
            table.append(Row(name, DTYPE, floor, goals, checks, functions, WAITING))
    return table


if __name__ == "__main__":
    main(rows(), "experts")
