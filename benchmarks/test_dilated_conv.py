"""Convolution stack against what one would write first, on whatever device is there.

    pytest benchmarks/test_dilated_conv.py

Small shapes: on CPU this compares the eager implementation with a matmul per tap and with F.conv1d; on a GPU the
kernels. The table of the large shapes is `benchmarks/gpu/conv.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from goal_kernels import causal_conv_stack

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DILATIONS = (1, 2, 4, 8)
# short windows of many users, and whole trajectories of few
SHAPES = [(256, 16, 64), (20, 100, 64)]


def ours(*tensors: Tensor) -> Tensor:
    return causal_conv_stack(*tensors, DILATIONS)


def matmul_per_tap(x: Tensor, weights: Tensor, biases: Tensor, gains: Tensor, shifts: Tensor) -> Tensor:
    length = x.shape[1]
    for layer, dilation in enumerate(DILATIONS):
        out = x + biases[layer]
        for tap in range(weights.shape[1]):
            shifted = F.pad(x, (0, 0, tap * dilation, 0))[:, :length]
            out = out + shifted @ weights[layer, tap]
        x = F.layer_norm(out, x.shape[-1:], gains[layer], shifts[layer])
    return x


def conv1d(x: Tensor, weights: Tensor, biases: Tensor, gains: Tensor, shifts: Tensor) -> Tensor:
    for layer, dilation in enumerate(DILATIONS):
        padded = F.pad(x.transpose(1, 2), (dilation * (weights.shape[1] - 1), 0))
        kernel = weights[layer].flip(0).permute(2, 1, 0)
        out = x + F.conv1d(padded, kernel, biases[layer], dilation=dilation).transpose(1, 2)
        x = F.layer_norm(out, x.shape[-1:], gains[layer], shifts[layer])
    return x


CONTESTANTS = {"ours": ours, "matmul_per_tap": matmul_per_tap, "conv1d": conv1d}


@pytest.mark.parametrize("contestant", CONTESTANTS)
@pytest.mark.parametrize("work", ["forward", "forward+backward"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_stack(benchmark, shape: tuple[int, int, int], work: str, contestant: str) -> None:
    benchmark.group = f"conv stack {work} {shape} {DEVICE}"
    channels = shape[2]
    torch.manual_seed(0)
    tensors = [
        torch.randn(shape, device=DEVICE),
        torch.randn(4, 3, channels, channels, device=DEVICE) * (3 * channels) ** -0.5,
        *(torch.randn(4, channels, device=DEVICE) * 0.1 + centre for centre in (0, 1, 0)),
    ]
    tensors = [tensor.requires_grad_() for tensor in tensors]
    upstream = torch.randn(shape, device=DEVICE)

    def run(function: Callable[..., Tensor]) -> list[Tensor]:
        with torch.set_grad_enabled(work != "forward"):
            results = [function(*tensors)]
            if work != "forward":
                results += torch.autograd.grad(results[0], tensors, upstream)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return results

    # parity before time
    for value, expected in zip(run(CONTESTANTS[contestant]), run(matmul_per_tap), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())
    benchmark.pedantic(run, (CONTESTANTS[contestant],), rounds=7, warmup_rounds=1)
