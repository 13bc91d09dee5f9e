"""Convolution kernels in Triton's interpreter: forward and every gradient against eager in fp64."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from goal_kernels.dilated_conv import causal_conv_block, causal_conv_stack, configurations, dilated_causal_conv, eager

pytest.importorskip("triton")

from goal_kernels.dilated_conv import triton_launch, triton_wide

RELATIVE_ERROR = {torch.float32: 1e-5, torch.float16: 1e-3}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def stack_arguments(
    batch: int, length: int, channels: int, taps: int, layers: int, dtype: torch.dtype, gain: float = 1.0
) -> list[Tensor]:
    """Vectors in fp32 beside 16-bit x and taps, as under autocast."""
    return [
        random(batch, length, channels, dtype=dtype, seed=1),
        random(layers, taps, channels, channels, dtype=dtype, seed=2, scale=(taps * channels) ** -0.5),
        random(layers, channels, seed=3, scale=0.1),
        gain * (1 + random(layers, channels, seed=4, scale=0.1)),
        random(layers, channels, seed=5, scale=0.1),
    ]


def check(
    function: Callable[..., Tensor],
    truth: Callable[..., Tensor],
    arguments: list[Tensor],
    upstream: Tensor,
) -> None:
    """Output and all gradients of `function` against `truth` in fp64, by relative L2 error."""
    leaves = [argument.detach().requires_grad_() for argument in arguments]
    out = function(*leaves)
    grads = torch.autograd.grad(out, leaves, upstream.to(out.dtype))
    exact = [argument.detach().double().requires_grad_() for argument in arguments]
    expected = truth(*exact)
    expected_grads = torch.autograd.grad(expected, exact, upstream.to(out.dtype).double())
    for value, wanted in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert value.shape == wanted.shape
        error = (value.double() - wanted).norm() / wanted.norm().clamp(min=1e-30)
        assert error < RELATIVE_ERROR[arguments[0].dtype]


def check_stack(arguments: list[Tensor], dilations: tuple[int, ...], scale: float = 1.0) -> None:
    check(
        lambda *tensors: causal_conv_stack(*tensors, dilations),
        lambda *tensors: eager.causal_conv_stack(*tensors, dilations, 1e-5),
        arguments,
        random(*arguments[0].shape, seed=9, scale=scale),
    )


# length 1 through past the receptive field; taps 1 to 5; several tiles of rows and of columns; Din != Dout
@pytest.mark.parametrize(
    ("length", "channels_in", "channels_out", "taps", "dilation", "dtype"),
    [
        (1, 5, 3, 3, 1, torch.float32),
        (4, 20, 33, 2, 3, torch.float32),
        (4, 20, 33, 2, 3, torch.float16),
        (7, 8, 8, 5, 3, torch.float32),
        (20, 16, 7, 1, 1, torch.float16),
        (9, 3, 18, 4, 100, torch.float32),
    ],
)
def test_plain_conv(
    length: int, channels_in: int, channels_out: int, taps: int, dilation: int, dtype: torch.dtype
) -> None:
    arguments = [
        random(2, length, channels_in, dtype=dtype, seed=1),
        random(taps, channels_in, channels_out, dtype=dtype, seed=2, scale=(taps * channels_in) ** -0.5),
        random(channels_out, seed=3),
    ]
    check(
        lambda *tensors: dilated_causal_conv(*tensors, dilation=dilation),
        lambda *tensors: eager.dilated_causal_conv(*tensors, dilation),
        arguments,
        random(2, length, channels_out, seed=9),
    )


@pytest.mark.parametrize(
    ("batch", "length", "channels", "taps", "dilations", "dtype"),
    [
        (1, 1, 16, 5, (1, 1), torch.float32),
        (2, 7, 6, 3, (1, 2, 4), torch.float32),
        (2, 7, 6, 3, (1, 2, 4), torch.float16),
        (3, 5, 20, 2, (1, 3), torch.float16),
        (2, 40, 4, 3, (2, 1), torch.float32),  # a sequence of several tiles
    ],
)
def test_stack(
    batch: int, length: int, channels: int, taps: int, dilations: tuple[int, ...], dtype: torch.dtype
) -> None:
    check_stack(stack_arguments(batch, length, channels, taps, len(dilations), dtype), dilations)


def test_stack_with_a_launch_per_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for long sequences; without gradients two buffers take turns."""
    arguments = stack_arguments(2, 40, 4, 2, 3, torch.float32)
    with torch.no_grad():
        at_once = causal_conv_stack(*arguments, (1, 2, 4))
        monkeypatch.setattr(configurations, "STACK_LENGTH", 0)
        torch.testing.assert_close(causal_conv_stack(*arguments, (1, 2, 4)), at_once)
    check_stack(arguments, (1, 2, 4))


def test_block() -> None:
    arguments = [
        argument[0] if i else argument for i, argument in enumerate(stack_arguments(2, 6, 5, 3, 1, torch.float32))
    ]
    check(
        lambda *tensors: causal_conv_block(*tensors, dilation=2),
        lambda *tensors: eager.causal_conv_block(*tensors, 2, 1e-5),
        arguments,
        random(2, 6, 5, seed=9),
    )


@pytest.mark.parametrize(("gain", "dtype"), [(0.05, torch.float16), (1e-3, torch.float32), (0.0, torch.float16)])
def test_norm_weights_near_zero(gain: float, dtype: torch.dtype) -> None:
    """Where the output does not determine the normalised row, the layer is run again."""
    layers = 1 if dtype == torch.float16 else 2
    # an upstream gradient that keeps the gradients of x out of fp16's subnormals
    check_stack(stack_arguments(2, 5, 6, 3, layers, dtype, gain=gain), (1, 2)[:layers], scale=1 / max(gain, 1e-3))


def test_rows_wider_than_one_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configurations, "FUSED_CHANNELS", {2: 8, 4: 8})
    check_stack(stack_arguments(2, 3, 20, 2, 2, torch.float32), (1, 2))
    check_stack(stack_arguments(1, 3, 20, 2, 1, torch.float32, gain=1e-3), (1,))


@pytest.mark.parametrize(("length", "kept"), [(16, 2**20), (31, 0)])
def test_descriptor_kernels(length: int, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels for wide rows on sm_90, at a small width; tiles that end with the sequence and ones that do not."""
    monkeypatch.setattr(configurations, "WIDE_CHANNELS", (32,))
    monkeypatch.setattr(configurations, "STACK_LENGTH", 0)
    monkeypatch.setattr(configurations, "KEPT_GRADIENT_BYTES", kept)
    launched = []
    convolve = triton_wide.convolve
    monkeypatch.setattr(triton_wide, "convolve", lambda *args, **kwargs: launched.append(convolve(*args, **kwargs)))
    check_stack(stack_arguments(2, length, 32, 3, 2, torch.float16), (1, 9))
    assert len(launched) == 4


def test_one_layer_of_gradients_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configurations, "KEPT_GRADIENT_BYTES", 0)
    check_stack(stack_arguments(2, 6, 6, 3, 2, torch.float32), (1, 2))


def test_inference_gives_the_bits_of_training() -> None:
    arguments = stack_arguments(1, 5, 4, 2, 3, torch.float32)
    with torch.no_grad():
        inference = causal_conv_stack(*arguments, (1, 2, 4))
    training = causal_conv_stack(*(argument.requires_grad_() for argument in arguments), (1, 2, 4))
    assert torch.equal(inference, training)


@pytest.mark.parametrize("shape", [(0, 5, 4), (2, 0, 4), (2, 5, 0)])
def test_zero_sizes(shape: tuple[int, int, int]) -> None:
    arguments = [argument.requires_grad_() for argument in stack_arguments(*shape[:2], 4, 3, 2, torch.float32)]
    if shape[2] == 0:
        arguments = [a[..., :0] if a.dim() < 4 else a[..., :0, :0] for a in arguments]
    out = causal_conv_stack(*arguments, (1, 2))
    assert out.shape == shape
    for grad in torch.autograd.grad(out.sum(), arguments):
        assert torch.equal(grad, torch.zeros_like(grad))
    conv = [arguments[0], torch.zeros(3, shape[2], 6, requires_grad=True), torch.ones(6, requires_grad=True)]
    out = dilated_causal_conv(*conv, dilation=1)
    assert torch.equal(out, torch.ones(*shape[:2], 6))
    grads = torch.autograd.grad(out.sum(), conv)
    assert torch.equal(grads[2], torch.full((6,), float(shape[0] * shape[1])))
    assert not any(grad.isnan().any() for grad in grads)


STRIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "expanded": lambda x: x[:1].expand(x.shape),
    "part of wider rows": lambda x: torch.cat([x, x], -1)[..., 1 : 1 + x.shape[-1]],
    "part of longer sequences": lambda x: torch.cat([x, x], 1)[:, 1 : 1 + x.shape[1]],
}


@pytest.mark.parametrize("layout", STRIDED)
def test_strides_of_inputs_and_of_the_upstream_gradient(layout: str) -> None:
    x, *parameters = stack_arguments(2, 5, 4, 2, 1, torch.float32)
    x, upstream = STRIDED[layout](x), STRIDED[layout](random(2, 5, 4, seed=8))
    parameters = [torch.stack([parameter, parameter], -1)[..., 0] for parameter in parameters]
    results = []
    for change in (lambda tensor: tensor, lambda tensor: tensor.contiguous()):
        tensors = [change(tensor.detach()).requires_grad_() for tensor in (x, *parameters)]
        out = causal_conv_stack(*tensors, (2,))
        plain = dilated_causal_conv(tensors[0], tensors[1][0], dilation=1)
        grads = torch.autograd.grad([out, plain], tensors, [change(upstream), change(upstream)])
        results.append([out, plain, *grads])
    for value, expected in zip(*results, strict=True):
        torch.testing.assert_close(value, expected)


def test_gradients_through_cat_and_expanded_sum() -> None:
    x, weight = random(2, 5, 4), random(2, 4, 3, seed=1)
    results = []
    for function in (
        lambda x, w: dilated_causal_conv(x, w, dilation=2),
        lambda x, w: eager.dilated_causal_conv(x, w, None, 2),
    ):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        out = function(*leaves)
        loss = out.sum() + (torch.cat([out, 2 * out], -1).transpose(1, 2) * random(2, 6, 5, seed=3)).sum()
        results.append(torch.autograd.grad(loss, leaves))
    for value, expected in zip(*results, strict=True):
        torch.testing.assert_close(value, expected)


def test_backward_is_deterministic_and_batch_rows_are_independent() -> None:
    arguments = stack_arguments(6, 9, 4, 2, 2, torch.float32)
    runs = []
    for _ in range(2):
        leaves = [argument.detach().requires_grad_() for argument in arguments]
        out = causal_conv_stack(*leaves, (1, 2))
        runs.append([out, *torch.autograd.grad(out, leaves, random(6, 9, 4, seed=2))])
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))
    alone = causal_conv_stack(arguments[0][2:3], *arguments[1:], (1, 2))
    torch.testing.assert_close(alone, runs[0][0][2:3])


def test_operators_pass_opcheck() -> None:
    from goal_kernels.dilated_conv import triton as kernels

    arguments = [a.requires_grad_() for a in stack_arguments(2, 4, 4, 2, 2, torch.float32)]
    torch.library.opcheck(kernels._stack, (*arguments, [1, 2], 1e-5, True))
    bias = random(3).requires_grad_()
    conv = (arguments[0], random(2, 4, 3).requires_grad_(), bias, 2)
    torch.library.opcheck(kernels._conv, conv)
    x, *parameters = (argument.detach() for argument in arguments)
    out, hidden, rstd = kernels._stack(x, *parameters, [1, 2], 1e-5, True)
    torch.library.opcheck(kernels._stack_backward, (out, x, hidden, out, rstd, *parameters, [1, 2], 1e-5))
    grad, weight = random(2, 4, 3), random(2, 4, 3)
    for bias in (random(3), None):
        torch.library.opcheck(kernels._conv_backward, (grad, x, weight, bias, 2))


# torch 2.13 itself warns when inductor is imported
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", *(["inductor"] if os.environ.get("CI") == "true" else [])])
@pytest.mark.parametrize("autocast", [False, True])
def test_compiles_to_one_graph(autocast: bool, backend: str) -> None:
    dtype = torch.float16 if autocast else torch.float32
    arguments = stack_arguments(2, 4, 4, 2, 2, torch.float32)
    upstream = random(2, 4, 4, seed=7, dtype=dtype)

    def run(*tensors: Tensor) -> Tensor:
        return causal_conv_stack(*tensors, (1, 2))

    results = []
    for function in (run, torch.compile(run, fullgraph=True, backend=backend)):
        leaves = [argument.detach().requires_grad_() for argument in arguments]
        with torch.autocast("cpu", dtype=torch.float16, enabled=autocast):
            out = function(*leaves)
        assert out.dtype == dtype
        results.append([out, *torch.autograd.grad(out, leaves, upstream)])
        assert all(grad.dtype == torch.float32 for grad in results[-1][1:])
    for value, expected in zip(*results, strict=True):
        assert torch.equal(value, expected)


def test_no_gradient_for_frozen_arguments() -> None:
    x, *parameters = stack_arguments(1, 3, 4, 2, 1, torch.float32)
    leaf = x.requires_grad_()
    out = causal_conv_stack(leaf, *parameters, (1,))
    out.sum().backward()
    assert leaf.grad is not None and all(parameter.grad is None for parameter in parameters)


def test_more_than_two_to_the_31_elements_between_rows() -> None:
    """Rows so far apart that an offset in elements does not fit 32 bits; the gaps are never touched."""
    length, stride = 264, 2**23
    assert (length - 1) * stride > 2**31
    # NumPy's zeros are pages that the system hands out on first use
    storage = torch.from_numpy(np.zeros(length * stride, np.float16))
    x = storage.as_strided((1, length, 2), (0, stride, 1))
    assert triton_launch.as_rows(x).data_ptr() == x.data_ptr(), "copied: the test would miss the offsets"
    x.copy_(torch.arange(2 * length).remainder(7).view(1, length, 2))
    weight = torch.eye(2, dtype=torch.float16).expand(2, 2, 2).contiguous()
    out = dilated_causal_conv(x, weight, dilation=1)
    assert torch.equal(out, x + torch.nn.functional.pad(x[:, :-1].contiguous(), (0, 0, 1, 0)))
