"""Ahead-of-time compilation of what the convolution ops launch: builds, fits, spills nothing, multiplies on wgmma."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from goal_kernels.dilated_conv import configurations

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

# in an ordinary run training at the shapes of the measured table, else every entry of the pinned tables
ALL_BUILDS = os.environ.get("GOAL_ALL_BUILDS") == "1"
EVERY = [
    *((channels, torch.bfloat16) for channels in (64, 100, 128, 256, 512, 520)),
    *((channels, torch.float32) for channels in (64, 128, 256, 512)),
    (128, torch.float16),
    (20, torch.float32),
]
WIDE_KERNELS = {"wide_kernel", "wide_weight_gradient_kernel"}
MATRIX_KERNELS = {"stack_kernel", "block_kernel", "conv_kernel", "weight_gradient_kernel"}


@pytest.mark.parametrize(("channels", "dtype"), EVERY if ALL_BUILDS else [(128, torch.bfloat16), (256, torch.bfloat16)])
def test_every_launch_compiles(channels: int, dtype: torch.dtype, compile_launches) -> None:
    from goal_kernels.dilated_conv import triton_passes as passes

    def everything() -> None:
        weights = torch.empty(2, 3, channels, channels, dtype=dtype)
        vectors = [torch.empty(2, channels) for _ in range(3)]
        every = ((100, True), (256, True), (100, False), (256, False))
        for length, keep in every if ALL_BUILDS else ((100 if channels == 128 else 256, True),):
            x = torch.empty(4, length, channels, dtype=dtype)
            out, hidden, rstd = passes.stack(x, weights, *vectors, (1, 2), 1e-5, keep)
            if keep:
                passes.stack_backward(x, x, hidden, out, rstd, weights, *vectors, (1, 2), 1e-5)
        if ALL_BUILDS:
            passes.conv(x, weights[0], vectors[0][0], 2)
            passes.conv_backward(x, x, weights[0], vectors[0][0], 2)

    kernels = compile_launches(everything)
    if ALL_BUILDS:
        fused = {"stack_kernel", "block_kernel"} if channels > configurations.FUSED_CHANNELS else set()
        assert {kernel.name for kernel in kernels} & MATRIX_KERNELS == MATRIX_KERNELS - fused
    for kernel in kernels:
        kernel.check(wgmma=kernel.name in MATRIX_KERNELS | WIDE_KERNELS and channels >= 64)
