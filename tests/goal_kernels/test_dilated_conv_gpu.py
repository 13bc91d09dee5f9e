"""The convolution ops on a GPU: parity in every format, and what only a GPU can show."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from goal_kernels.backend import backend_for
from goal_kernels.dilated_conv import causal_conv_stack, dilated_causal_conv, eager

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

RELATIVE_ERROR = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
DILATIONS = (1, 2, 4)
# One worker of xdist runs what needs most of the card's memory, one test after another (--dist loadgroup)
memory = pytest.mark.xdist_group("memory")


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, generator=generator, device="cuda") * scale).to(dtype)


def stack_arguments(batch: int, length: int, channels: int, dtype: torch.dtype, gain: float = 1.0) -> list[Tensor]:
    layers, taps = len(DILATIONS), 3
    tensors = [
        random(batch, length, channels, dtype=dtype, seed=1),
        random(layers, taps, channels, channels, dtype=dtype, seed=2, scale=(taps * channels) ** -0.5),
        random(layers, channels, seed=3, scale=0.1),
        gain * (1 + random(layers, channels, seed=4, scale=0.1)),
        random(layers, channels, seed=5, scale=0.1),
    ]
    return [tensor.requires_grad_() for tensor in tensors]


def ours(*tensors: Tensor) -> Tensor:
    return causal_conv_stack(*tensors, DILATIONS)


def truth(*tensors: Tensor) -> Tensor:
    return eager.causal_conv_stack(*tensors, DILATIONS, 1e-5)


def with_gradients(function: Callable[..., Tensor], tensors: list[Tensor], upstream: Tensor) -> list[Tensor]:
    out = function(*tensors)
    return [out, *torch.autograd.grad(out, tensors, upstream.to(out.dtype))]


def check(function, exact, tensors: list[Tensor], upstream: Tensor) -> list[Tensor]:
    values = with_gradients(function, tensors, upstream)
    doubles = [tensor.detach().double().requires_grad_() for tensor in tensors]
    upstream = upstream.to(values[0].dtype).double()
    for value, wanted in zip(values, with_gradients(exact, doubles, upstream), strict=True):
        error = (value.double() - wanted).norm() / wanted.norm().clamp(min=1e-30)
        assert error < RELATIVE_ERROR[tensors[0].dtype]
    return values


def test_backend_is_triton() -> None:
    assert backend_for(torch.zeros(1, device="cuda")) == "triton"


@pytest.mark.parametrize(
    ("batch", "length", "channels", "dtype"),
    [
        (50, 100, 128, torch.bfloat16),
        (50, 100, 128, torch.float16),
        (9, 256, 256, torch.bfloat16),
        (9, 250, 256, torch.float16),  # tiles that end past the sequence
        (170, 256, 256, torch.bfloat16),  # more tiles than persistent programs
        (7, 300, 128, torch.bfloat16),  # a launch per layer, pointers
        (50, 16, 64, torch.bfloat16),
        (33, 37, 20, torch.float32),
        (5, 130, 128, torch.float32),
        (3, 20, 520, torch.bfloat16),  # wider than one tile
        (1, 1, 64, torch.bfloat16),
        (3, 5, 512, torch.bfloat16),
    ],
)
def test_stack(batch: int, length: int, channels: int, dtype: torch.dtype) -> None:
    tensors = stack_arguments(batch, length, channels, dtype)
    upstream = random(batch, length, channels, seed=9)
    first = check(ours, truth, tensors, upstream)
    second = with_gradients(ours, tensors, upstream)
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True)), "runs differ"


@pytest.mark.parametrize("gain", [0.05, 0.001])
def test_norm_weights_near_zero(gain: float) -> None:
    tensors = stack_arguments(20, 100, 128, torch.bfloat16, gain=gain)
    check(ours, truth, tensors, random(20, 100, 128, seed=9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_conv_with_other_width(dtype: torch.dtype) -> None:
    tensors = [random(9, 50, 48, dtype=dtype), random(4, 48, 72, dtype=dtype, scale=0.07), random(72)]
    tensors = [tensor.requires_grad_() for tensor in tensors]
    check(
        lambda *values: dilated_causal_conv(*values, dilation=7),
        lambda *values: eager.dilated_causal_conv(*values, 7),
        tensors,
        random(9, 50, 72, seed=9),
    )


@pytest.mark.parametrize(("length", "channels"), [(100, 128), (256, 256)])
def test_graph_capture(length: int, channels: int) -> None:
    tensors = stack_arguments(8, length, channels, torch.bfloat16)
    upstream = random(8, length, channels, dtype=torch.bfloat16, seed=9)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        with_gradients(ours, tensors, upstream)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = with_gradients(ours, tensors, upstream)
    with torch.no_grad():
        tensors[0].copy_(random(8, length, channels, seed=77))
    graph.replay()
    for value, expected in zip(captured, with_gradients(ours, tensors, upstream), strict=True):
        assert torch.equal(value, expected)


# Inductor still imports what torch deprecates: https://github.com/pytorch/pytorch/issues/174081
@pytest.mark.filterwarnings("ignore:`torch.jit.*` is:DeprecationWarning")
def test_compiles_under_autocast() -> None:
    tensors = stack_arguments(8, 100, 128, torch.float32)
    upstream = random(8, 100, 128, dtype=torch.bfloat16, seed=9)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        expected = with_gradients(ours, tensors, upstream)
        values = with_gradients(torch.compile(ours, fullgraph=True), tensors, upstream)
    assert values[0].dtype == torch.bfloat16
    for value, wanted in zip(values, expected, strict=True):
        assert torch.equal(value, wanted)


def test_layouts_give_the_same_gradients() -> None:
    x, *parameters = stack_arguments(6, 40, 64, torch.bfloat16)
    upstream = random(6, 64, 40, dtype=torch.bfloat16, seed=9).transpose(1, 2)
    strided = torch.cat([x.detach(), x.detach()], -1)[..., 64:].requires_grad_()
    values = with_gradients(ours, [strided, *parameters], upstream)
    for value, expected in zip(values, with_gradients(ours, [x, *parameters], upstream.contiguous()), strict=True):
        assert torch.equal(value, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_launches_on_the_device_of_the_input() -> None:
    tensors = [tensor.detach().to("cuda:1") for tensor in stack_arguments(2, 20, 64, torch.bfloat16)]
    assert torch.isfinite(ours(*tensors)).all()


@memory
def test_more_than_two_to_the_31_elements() -> None:
    """Rows past the 31-bit edge, forward and backward, and more than 65,535 tiles."""
    batch, length, channels, last = 2**19 + 8, 256, 16, 3
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs 30 GiB of free GPU memory")
    x = torch.zeros(batch, length, channels, dtype=torch.bfloat16, device="cuda")
    upstream = torch.zeros_like(x)
    x[-last:], upstream[-last:] = random(last, length, channels, seed=1), random(last, length, channels, seed=3)
    weight = random(3, channels, channels, dtype=torch.bfloat16, seed=2, scale=0.1).requires_grad_()
    near = [x[-last:].clone().requires_grad_(), weight]

    def conv(*tensors: Tensor) -> Tensor:
        return dilated_causal_conv(*tensors, dilation=2)

    out, grad_x, grad_weight = with_gradients(conv, [x.requires_grad_(), weight], upstream)
    expected = with_gradients(conv, near, upstream[-last:].clone())
    for value, wanted in zip((out[-last:], grad_x[-last:], grad_weight), expected, strict=True):
        torch.testing.assert_close(value, wanted)
    assert not out[:-last].any() and not grad_x[:-last].any()
