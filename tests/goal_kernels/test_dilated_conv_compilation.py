"""Ahead-of-time compilation of what the convolution ops launch: builds, fits, spills nothing, multiplies on wgmma.

Ordinarily training at the shapes of the measured table for sm_90, what once spilled, and each kernel once for sm_80 and
sm_100; with `GOAL_ALL_BUILDS=1` every entry of the pinned tables, with and without masks, for all three. Triton keeps
what it built, so that only the first run takes minutes.
"""

from __future__ import annotations

import importlib.util
import re

import pytest
import torch

from goal_kernels.dilated_conv import configurations

from .conftest import every_tile

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EVERY = [
    *((channels, BF16) for channels in (40, 64, 100, 128, 200, 256, 392, 512, 520)),
    *((channels, FP32) for channels in (20, 64, 100, 128, 200, 256, 392, 512)),
    (128, FP16),
]
WIDE_KERNELS = {"wide_kernel", "wide_weight_gradient_kernel"}
MATRIX_KERNELS = {"stack_kernel", "block_kernel", "conv_kernel", "weight_gradient_kernel"}
VECTOR_KERNELS = {"norm_backward_kernel", "sum_partials_kernel", "sum_vectors_kernel"}


def stack(
    channels: int,
    dtype: torch.dtype,
    length: int,
    *,
    keep: bool,
    backward: bool = False,
    dilations: tuple[int, ...] = (1, 2),
) -> None:
    from goal_kernels.dilated_conv import triton_passes as passes

    weights = torch.empty(len(dilations), 3, channels, channels, dtype=dtype)
    vectors = [torch.empty(len(dilations), channels) for _ in range(3)]
    x = torch.empty(4, length, channels, dtype=dtype)
    out, hidden, rstd = passes.stack(x, weights, *vectors, dilations, 1e-5, keep)
    if backward:
        passes.stack_backward(x, x, hidden, out, rstd, weights, *vectors, dilations, 1e-5)


def plain(channels: int, dtype: torch.dtype) -> None:
    from goal_kernels.dilated_conv import triton_passes as passes

    x, weight = torch.empty(4, 256, channels, dtype=dtype), torch.empty(3, channels, channels, dtype=dtype)
    for bias in (None, torch.empty(channels)):
        passes.conv(x, weight, bias, 2)
        passes.conv_backward(x, x, weight, bias, 2)


def check(kernels, channels: int) -> set[str]:
    for kernel in kernels:
        kernel.check(wgmma=kernel.name in MATRIX_KERNELS | WIDE_KERNELS and channels >= 64)
    return {kernel.name for kernel in kernels}


@pytest.mark.parametrize(("length", "channels"), [(100, 128), (256, 256)])
def test_training_at_the_measured_shapes(length: int, channels: int, compile_launches) -> None:
    def training() -> None:
        stack(channels, BF16, length, keep=True, backward=True, dilations=(1, 2, 4, 8))

    kernels = compile_launches(training)
    names = check(kernels, channels)
    for kernel in kernels:
        if kernel.name == "stack_kernel":
            moved = re.findall(r"ttg.convert_layout .*: tensor<(\w+)x(\w+)x(\w+),", kernel.ttgir)
            assert moved and all(kind == "bf16" for *_, kind in moved), (
                "a tile changes its layout as bf16 or not at all"
            )
    assert names >= ({"stack_kernel", "conv_kernel"} if channels == 128 else WIDE_KERNELS)


@pytest.mark.parametrize(
    ("channels", "dtype", "capability"), [(512, BF16, 90), (256, FP32, 90), (512, FP32, 90), (200, FP32, 90)]
)
def test_forward_where_it_once_spilled(channels: int, dtype: torch.dtype, capability: int, compile_launches) -> None:
    for keep in (False, True):
        kernels = compile_launches(lambda keep=keep: stack(channels, dtype, 100, keep=keep), (capability,))
        check(kernels, channels)


def test_masked_channels_where_they_once_spilled(compile_launches) -> None:
    from goal_kernels.dilated_conv import triton_passes as passes

    x, weight, bias = torch.empty(4, 256, 520, dtype=BF16), torch.empty(3, 520, 520, dtype=BF16), torch.empty(520)
    check(compile_launches(lambda: passes.conv(x, weight, bias, 2), (100,)), 520)


@pytest.mark.parametrize("capability", [80, 100])
def test_every_kernel_for_other_cards(capability: int, compile_launches) -> None:
    def everything() -> None:
        stack(64, BF16, 100, keep=True, backward=True)
        stack(1024, BF16, 256, keep=False)
        plain(64, BF16)

    names = check(compile_launches(everything, (capability,)), 64)
    assert names == MATRIX_KERNELS | VECTOR_KERNELS | {"norm_kernel", "column_sum_kernel"}


@every_tile
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(("channels", "dtype"), EVERY)
def test_every_launch(channels: int, dtype: torch.dtype, capability: int, compile_launches) -> None:
    def everything() -> None:
        # several sequences in a tile, several tiles a sequence, a launch a layer
        for length in (20, 100, 256):
            stack(channels, dtype, length, keep=True, backward=True)
            stack(channels, dtype, length, keep=False)
        plain(channels, dtype)

    names = check(compile_launches(everything, (capability,)), channels)
    expected = MATRIX_KERNELS | VECTOR_KERNELS | {"column_sum_kernel"}
    if not configurations.fuses_layers(100, channels, dtype):
        expected -= {"stack_kernel"}
    if not configurations.fuses(channels, dtype):
        expected = expected - {"block_kernel"} | {"norm_kernel"}
    if capability == 90 and dtype != FP32 and channels in configurations.WIDE_CHANNELS:
        expected |= WIDE_KERNELS
    assert names == expected
