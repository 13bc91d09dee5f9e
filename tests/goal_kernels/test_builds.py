"""Ahead-of-time builds of the expert, advantage and loss kernels: no GPU, the launches of real shapes.

Ordinarily the measured shapes for sm_90, and each kernel once for sm_80 and sm_100; with `GOAL_ALL_BUILDS=1` the
measured shapes, and every tile that `_plan.py` and the launches choose, for all three. Triton keeps what it built, so
that only the first run takes minutes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from .conftest import ALL_BUILDS, every_tile

pytest.importorskip("triton")
EVERY_CARD = (80, 90, 100)
CAPABILITIES = EVERY_CARD if ALL_BUILDS else (90,)
# Kernels that multiply tiles of 64 rows or more.
MATMULS = (
    "mixture_kernel",
    "experts_kernel",
    "grouped_matmul_kernel",
    "hidden_backward_kernel",
    "weight_gradient_kernel",
)
EVERY_KERNEL = {
    *MATMULS,
    *("router_kernel", "sort_kernel", "combine_kernel", "sum_kernel"),
    *("gate_backward_kernel", "condition_backward_kernel", "gate_sum_kernel"),
    *("scpo_loss_kernel", "scpo_summary_kernel", "scale_kernel"),
    "group_advantage_kernel",
}


@pytest.fixture
def no_synchronisation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever would wait for a GPU, and break the capture of a graph, is an error."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a synchronisation with the device")

    for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"):
        monkeypatch.setattr(Tensor, name, refuse)


def routed_experts(
    tokens: int,
    channels: int,
    hidden: int,
    experts: int,
    dtype: torch.dtype,
    k: int = 2,
    activation: str = "gelu_tanh",
    router: torch.dtype | None = None,
) -> None:
    """Biases in fp32 beside `dtype`, and the router in `router`: in fp32 as autocast leaves it, or like the tokens."""
    from goal_kernels.routed_experts import triton

    groups = max(tokens // 8, 1) if tokens % 8 == 0 else 1
    shapes = (
        (tokens, channels),
        (groups, channels),
        (experts, 2 * channels),
        (experts, channels, hidden),
        (experts, hidden),
        (experts, hidden, channels),
        (experts, channels),
    )
    gate = router or dtype
    kinds = (dtype, gate, gate, dtype, torch.float32, dtype, torch.float32)
    arguments: list[Any] = [
        torch.zeros(shape, dtype=kind, requires_grad=True) for shape, kind in zip(shapes, kinds, strict=True)
    ]
    out, routing = triton.routed_experts(*arguments, k=k, activation=activation)
    if out.requires_grad:
        (out.sum() + routing.weights.sum() + routing.probabilities.sum()).backward()


def route_topk(channels: int, experts: int, dtype: torch.dtype, router: torch.dtype) -> None:
    from goal_kernels.routed_experts import triton

    shapes = ((4096, channels), (4096, channels), (experts, 2 * channels))
    arguments = [
        torch.zeros(shape, dtype=kind, requires_grad=True)
        for shape, kind in zip(shapes, (dtype, router, router), strict=True)
    ]
    routing = triton.route_topk(*arguments, k=2)
    (routing.weights.sum() + routing.probabilities.sum()).backward()


def scpo_loss(steps: int, vocabulary: int, dtype: torch.dtype, kl: str, ratio: str) -> None:
    from goal_kernels.scpo_loss import triton

    logits = torch.zeros(64, steps, vocabulary, dtype=dtype, requires_grad=True)
    result = triton.scpo_loss(
        logits,
        torch.zeros_like(logits),
        torch.zeros(64, steps, dtype=torch.int64),
        torch.zeros(64, steps),
        torch.ones(64, dtype=torch.int64),
        torch.ones(64),
        clip_low=0.2,
        clip_high=0.2,
        kl_weight=0.1,
        kl=kl,
        ratio=ratio,
    )
    result.loss.backward()


def group_advantage(candidates: int, dtype: torch.dtype) -> None:
    from goal_kernels.group_advantage import triton

    reward, cost = torch.zeros(30, 7, candidates, dtype=dtype), torch.zeros(30, 7, candidates, dtype=dtype)
    triton.group_advantage(reward, cost, torch.zeros(7), eps=1e-6, std_floor=0.0)
    triton.group_advantage(
        reward, cost.transpose(0, 1).contiguous().transpose(0, 1), torch.zeros(7), eps=1e-6, std_floor=0.0
    )


@pytest.mark.parametrize("router", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens, channels, hidden, experts", [(4096, 128, 512, 4), (32768, 256, 1024, 8)])
def test_experts(compile_launches, no_synchronisation, tokens, channels, hidden, experts, router):
    def launch() -> None:
        # The backward pass of the dense layout runs the kernels of the sorted one: all builds means both
        with torch.set_grad_enabled(ALL_BUILDS or tokens > 4096):
            routed_experts(tokens, channels, hidden, experts, torch.bfloat16, router=router)

    kernels = compile_launches(launch, CAPABILITIES)
    for kernel in kernels:
        kernel.check(wgmma=kernel.name in MATMULS)
        if kernel.name == "mixture_kernel" and kernel.capability == 90:
            assert kernel.registers <= 128, "two programs of 8 warps a multiprocessor"


@pytest.mark.parametrize("kl", ["exact", "k3"])
def test_scpo_loss(compile_launches, no_synchronisation, kl):
    for kernel in compile_launches(lambda: scpo_loss(8, 64, torch.bfloat16, kl, "sequence"), CAPABILITIES):
        kernel.check()
        if kernel.name == "scpo_loss_kernel":
            assert "bar.sync" not in kernel.ptx, "a sequence is one warp's"
            loads = kernel.ptx[kernel.ptx.index("ld.global") : kernel.ptx.rindex("ld.global")]
            assert "shfl.sync" not in loads, "no load waits for a sum"


def test_group_advantage(compile_launches, no_synchronisation):
    for kernel in compile_launches(lambda: group_advantage(16, torch.float32), CAPABILITIES):
        kernel.check()
    contiguous = compile_launches(lambda: group_advantage(16, torch.float32))[0]
    assert contiguous.registers <= 40, "12 programs of 4 warps a multiprocessor"
    assert contiguous.ptx.count("ld.global.L1::evict_first") >= 2


@pytest.mark.parametrize("capability", [80, 100])
def test_every_kernel_for_other_cards(compile_launches, monkeypatch, capability):
    from goal_kernels.routed_experts import _plan

    def few_tokens() -> None:
        with torch.no_grad():
            routed_experts(512, 64, 64, 4, torch.bfloat16)

    def many_tokens() -> None:
        routed_experts(512, 64, 64, 4, torch.bfloat16)

    kernels = compile_launches(few_tokens, (capability,))
    monkeypatch.setattr(_plan, "DENSE_PAIRS", 0)
    kernels += compile_launches(many_tokens, (capability,))
    kernels += compile_launches(lambda: scpo_loss(8, 64, torch.bfloat16, "exact", "sequence"), (capability,))
    kernels += compile_launches(lambda: group_advantage(16, torch.float32), (capability,))
    for kernel in kernels:
        kernel.check()
    assert {kernel.name for kernel in kernels} == EVERY_KERNEL


@every_tile
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("tokens", "channels", "hidden", "experts", "k", "activation"),
    [
        (8, 128, 512, 4, 2, "gelu_tanh"),  # one launch
        (8, 256, 512, 4, 1, "relu"),
        (512, 64, 128, 4, 2, "gelu"),  # dense, tiles of 64
        (1000, 256, 512, 8, 2, "silu"),
        (300, 96, 208, 50, 4, "gelu_tanh"),  # sizes that fill no tile, many experts
        (3000, 192, 304, 4, 2, "silu"),  # dense, tiles of 128
        (40000, 128, 512, 4, 2, "gelu"),  # sorted
        (40000, 64, 64, 4, 2, "gelu"),
        (40000, 112, 80, 30, 3, "relu"),
        (3000, 201, 303, 4, 2, "silu"),  # rows that start anywhere
        (9000, 512, 1024, 4, 2, "gelu_tanh"),  # two matmuls
    ],
)
def test_every_tile_of_the_experts(compile_launches, dtype, tokens, channels, hidden, experts, k, activation):
    from goal_kernels.routed_experts._plan import plan

    def launch() -> None:
        routed_experts(tokens, channels, hidden, experts, dtype, k, activation)

    # Hopper's matrix unit takes tiles of 64 rows and more
    rows = plan(tokens, channels, hidden, experts, k, dtype, torch.device("cpu")).rows
    for kernel in compile_launches(launch, EVERY_CARD):
        kernel.check(wgmma=kernel.name in MATMULS and min(rows, channels, hidden) >= 64)


@every_tile
@pytest.mark.parametrize(("channels", "experts"), [(256, 8), (201, 4), (128, 30), (128, 50), (128, 100)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_tile_of_the_router(compile_launches, dtype, channels, experts):
    """Alone, and in fp32 beside tokens in bf16 as under autocast."""
    for kernel in compile_launches(lambda: route_topk(channels, experts, dtype, torch.float32), EVERY_CARD):
        kernel.check()


@every_tile
def test_as_many_experts_as_are_supported_fit(compile_launches):
    """In fp32 some kernels spill at so many, and run."""
    from goal_kernels.routed_experts._plan import MAX_EXPERTS

    for kernel in compile_launches(lambda: route_topk(128, MAX_EXPERTS, torch.float32, torch.float32), EVERY_CARD):
        kernel.check_memory()


@every_tile
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("steps", "vocabulary"), [(4, 14), (8, 24), (2, 64), (5, 100), (8, 512), (1, 3000)])
def test_every_tile_of_the_loss(compile_launches, dtype, steps, vocabulary):
    for kl, ratio in (("exact", "token"), ("k3", "sequence")):
        for kernel in compile_launches(
            lambda kl=kl, ratio=ratio: scpo_loss(steps, vocabulary, dtype, kl, ratio), EVERY_CARD
        ):
            kernel.check()


@every_tile
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_tile_of_the_advantage(compile_launches, dtype):
    for candidates in (1, 7, 300, 8192):
        for kernel in compile_launches(lambda candidates=candidates: group_advantage(candidates, dtype), EVERY_CARD):
            kernel.check()
