"""The convolution ops against the definition written as loops, in eager and on whatever backend is in force."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from goal_kernels.dilated_conv import causal_conv_block, causal_conv_stack, dilated_causal_conv

RELATIVE_ERROR = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}


def naive_conv(x: Tensor, weight: Tensor, bias: Tensor | None, dilation: int) -> Tensor:
    """The sum of the definition, position by position."""
    batch, length, _ = x.shape
    rows = []
    for position in range(length):
        row = x.new_zeros(batch, weight.shape[2]) if bias is None else bias.expand(batch, -1)
        for tap in range(weight.shape[0]):
            if position - dilation * tap >= 0:
                row = row + x[:, position - dilation * tap] @ weight[tap]
        rows.append(row)
    return torch.stack(rows, 1)


def naive_stack(x: Tensor, weights: Tensor, biases: Tensor, gains: Tensor, shifts: Tensor, dilations: tuple[int, ...]):
    for layer, dilation in enumerate(dilations):
        x = x + naive_conv(x, weights[layer], biases[layer], dilation)
        x = F.layer_norm(x, x.shape[-1:], gains[layer], shifts[layer], 1e-5)
    return x


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def stack_arguments(batch: int, length: int, channels: int, taps: int, layers: int, dtype: torch.dtype) -> list[Tensor]:
    return [
        random(batch, length, channels, dtype=dtype, seed=1),
        random(layers, taps, channels, channels, dtype=dtype, seed=2, scale=(taps * channels) ** -0.5),
        random(layers, channels, dtype=dtype, seed=3, scale=0.1),
        (1 + random(layers, channels, seed=4, scale=0.1)).to(dtype),
        random(layers, channels, dtype=dtype, seed=5, scale=0.1),
    ]


def relative_error(value: Tensor, truth: Tensor) -> float:
    return ((value.double() - truth.double()).norm() / truth.double().norm().clamp(min=1e-300)).item()


def gradients(function: Callable[..., Tensor], arguments: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """Output and gradient of every argument under a non-uniform upstream gradient."""
    leaves = [argument.detach().requires_grad_() for argument in arguments]
    out = function(*leaves)
    out.backward(upstream.to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("dtype", RELATIVE_ERROR)
@pytest.mark.parametrize(("length", "taps", "dilation"), [(1, 3, 1), (5, 3, 4), (9, 3, 2), (7, 1, 3), (12, 5, 2)])
def test_conv_matches_the_definition(dtype: torch.dtype, length: int, taps: int, dilation: int) -> None:
    arguments = [
        random(3, length, 6, dtype=dtype, seed=1),
        random(taps, 6, 5, dtype=dtype, seed=2, scale=0.3),
        random(5, dtype=dtype, seed=3),
    ]
    upstream = random(3, length, 5, seed=4)
    ours = gradients(lambda x, w, b: dilated_causal_conv(x, w, b, dilation=dilation), arguments, upstream)
    truth = gradients(
        lambda x, w, b: naive_conv(x, w, b, dilation), [argument.double() for argument in arguments], upstream
    )
    for value, expected in zip(ours, truth, strict=True):
        assert value.dtype == dtype
        assert relative_error(value, expected) < RELATIVE_ERROR[dtype]


@pytest.mark.parametrize("dtype", RELATIVE_ERROR)
@pytest.mark.parametrize("length", [1, 2, 7, 16])
def test_stack_matches_the_definition(dtype: torch.dtype, length: int) -> None:
    dilations = (1, 2, 4)
    arguments = stack_arguments(2, length, 6, 3, 3, dtype)
    upstream = random(2, length, 6, seed=9)
    ours = gradients(lambda *tensors: causal_conv_stack(*tensors, dilations), arguments, upstream)
    truth = gradients(lambda *tensors: naive_stack(*tensors, dilations), [a.double() for a in arguments], upstream)
    for value, expected in zip(ours, truth, strict=True):
        assert relative_error(value, expected) < 2 * RELATIVE_ERROR[dtype]


def test_block_is_a_stack_of_one() -> None:
    x, weights, biases, gains, shifts = stack_arguments(2, 9, 6, 3, 1, torch.float32)
    block = causal_conv_block(x, weights[0], biases[0], gains[0], shifts[0], dilation=2)
    assert torch.equal(block, causal_conv_stack(x, weights, biases, gains, shifts, [2]))


def test_second_derivatives_of_eager() -> None:
    arguments = [argument.requires_grad_() for argument in stack_arguments(1, 3, 2, 2, 2, torch.float64)]

    def run(*tensors: Tensor) -> Tensor:
        return causal_conv_stack(*tensors, (1, 2))

    assert torch.autograd.gradcheck(run, arguments)
    assert torch.autograd.gradgradcheck(run, arguments)


def test_no_position_sees_the_future() -> None:
    x, *parameters = stack_arguments(1, 12, 4, 3, 3, torch.float64)
    before = causal_conv_stack(x, *parameters, (1, 2, 4))
    x[:, 7:] += 100.0
    assert torch.equal(causal_conv_stack(x, *parameters, (1, 2, 4))[:, :7], before[:, :7])


@pytest.mark.parametrize("shape", [(0, 5, 4), (2, 0, 4), (2, 5, 0), (0, 0, 0)])
def test_zero_sizes(shape: tuple[int, int, int]) -> None:
    arguments = stack_arguments(*shape[:2], max(shape[2], 1), 3, 2, torch.float32)
    if shape[2] == 0:
        arguments = [a[..., :0] if a.dim() < 4 else a[..., :0, :0] for a in arguments]
    out, *grads = gradients(lambda *tensors: causal_conv_stack(*tensors, (1, 2)), arguments, torch.ones(shape))
    assert out.shape == shape
    for grad, argument in zip(grads, arguments, strict=True):
        assert torch.equal(grad, torch.zeros_like(argument))
    assert dilated_causal_conv(arguments[0], torch.zeros(3, shape[2], 0), dilation=1).shape == (*shape[:2], 0)
    wide = dilated_causal_conv(arguments[0], torch.zeros(3, shape[2], 2), torch.ones(2), dilation=1)
    assert torch.equal(wide, torch.ones(*shape[:2], 2))


def test_empty_stack_returns_its_input() -> None:
    x = random(2, 3, 4)
    empty = torch.zeros(0, 4)
    assert causal_conv_stack(x, torch.zeros(0, 3, 4, 4, dtype=x.dtype), empty, empty, empty, ()) is x


STRIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every second channel": lambda x: torch.stack([x, x], -1)[..., 0],
    "batch inside": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "expanded": lambda x: x[:1].expand(x.shape),
    "shifted window": lambda x: torch.cat([x, x], 1)[:, 1 : 1 + x.shape[1]],
}


@pytest.mark.parametrize("layout", STRIDED)
def test_strides_of_inputs_and_of_the_upstream_gradient(layout: str) -> None:
    dilations = (1, 3)
    x, *parameters = stack_arguments(3, 8, 6, 3, 2, torch.float32)
    x = STRIDED[layout](x)
    upstream = STRIDED[layout](random(3, 8, 6, dtype=torch.float32, seed=8))

    def run(layouted: bool) -> list[Tensor]:
        leaf = x.detach().requires_grad_() if layouted else x.detach().contiguous().requires_grad_()
        tensors = [parameter.detach().requires_grad_() for parameter in parameters]
        out = causal_conv_stack(leaf, *tensors, dilations)
        return [out, *torch.autograd.grad(out, [leaf, *tensors], upstream if layouted else upstream.contiguous())]

    for value, expected in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("through", ["cat", "expanded sum", "transpose"])
def test_gradients_through_what_follows(through: str) -> None:
    follow: dict[str, Callable[[Tensor], Tensor]] = {
        "cat": lambda out: (torch.cat([out, 2 * out], -1) * random(2, 6, 10, seed=3)).sum(),
        "expanded sum": lambda out: out.sum(),
        "transpose": lambda out: (out.transpose(1, 2) * random(2, 5, 6, seed=3)).sum(),
    }
    results = []
    for function in (lambda x, w: dilated_causal_conv(x, w, dilation=2), lambda x, w: naive_conv(x, w, None, 2)):
        x, weight = random(2, 6, 4).requires_grad_(), random(3, 4, 5, seed=1).requires_grad_()
        results.append(torch.autograd.grad(follow[through](function(x, weight)), [x, weight]))
    for value, expected in zip(*results, strict=True):
        torch.testing.assert_close(value, expected)


# Inductor still imports what torch deprecates: https://github.com/pytorch/pytorch/issues/174081
@pytest.mark.filterwarnings("ignore:`torch.jit.*` is:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", *(["inductor"] if os.environ.get("CI") == "true" else [])])
def test_compiles_to_one_graph(backend: str) -> None:
    """With gradients through aot_eager; Inductor, whose C++ compiler is slow, forward and in CI only."""
    dilations = (1, 2)
    arguments = stack_arguments(2, 6, 8, 3, 2, torch.float32)

    def run(*tensors: Tensor) -> Tensor:
        return causal_conv_stack(*tensors, dilations)

    compiled = torch.compile(run, fullgraph=True, backend=backend)
    if backend == "inductor":
        torch.testing.assert_close(compiled(*arguments), run(*arguments))
        return
    upstream = random(2, 6, 8, seed=6)
    pairs = zip(gradients(compiled, arguments, upstream), gradients(run, arguments, upstream), strict=True)
    for value, expected in pairs:
        torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_sets_the_dtype_of_taps_and_keeps_fp32_bias(compiled: bool) -> None:
    arguments = stack_arguments(2, 6, 8, 3, 2, torch.float32)
    truth = causal_conv_stack(*(argument.double() for argument in arguments), (1, 2))

    def run(*tensors: Tensor) -> Tensor:
        return causal_conv_stack(*tensors, (1, 2))

    if compiled:
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, *grads = gradients(run, arguments, torch.ones(2, 6, 8))
    assert out.dtype == torch.bfloat16
    assert all(grad.dtype == torch.float32 for grad in grads)
    assert relative_error(out, truth) < 1e-2


def test_fp32_bias_beside_bf16_inputs() -> None:
    x, weights, *vectors = stack_arguments(2, 6, 8, 3, 2, torch.float32)
    out = causal_conv_stack(x.bfloat16(), weights.bfloat16(), *vectors, (1, 2))
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": [1, 2]}, TypeError, "x is a list; expected a torch.Tensor"),
        ({"x": torch.zeros(2, 3, dtype=torch.int64)}, TypeError, "x has dtype torch.int64"),
        ({"x": torch.zeros(2, 4)}, ValueError, r"x has shape \(2, 4\); expected \(B, L, D\) = \(any, any, any\)"),
        ({"weights": torch.zeros(2, 3, 4, 5)}, ValueError, r"weights has shape .* \(J, K, D, D\) = \(2, any, 4, 4\)"),
        ({"weights": torch.zeros(2, 0, 4, 4)}, ValueError, "number of taps of weights is 0; expected at least 1"),
        ({"weights": torch.zeros(2, 3, 4, 4).half()}, TypeError, "weights has dtype torch.float16 but x has"),
        ({"biases": torch.zeros(4)}, ValueError, r"biases has shape \(4,\); expected \(J, D\) = \(2, 4\)"),
        ({"norm_weights": torch.zeros(2, 4, device="meta")}, ValueError, "norm_weights is on meta but x is on cpu"),
        ({"dilations": (1, 0)}, ValueError, r"dilations\[1\] is 0; expected at least 1"),
        ({"dilations": (1, 2.0)}, TypeError, r"dilations\[1\] is 2.0, a float; expected an int"),
        ({"dilations": (1,)}, ValueError, r"weights has shape \(2, 3, 4, 4\); expected .* = \(1, any, 4, 4\)"),
        ({"eps": 0.0}, ValueError, "eps is 0.0; expected a finite number above 0"),
    ],
)
def test_mistakes_are_named(change: dict[str, object], error: type[Exception], message: str) -> None:
    arguments: dict[str, object] = {
        "x": torch.zeros(2, 5, 4),
        "weights": torch.zeros(2, 3, 4, 4),
        "biases": torch.zeros(2, 4),
        "norm_weights": torch.ones(2, 4),
        "norm_biases": torch.zeros(2, 4),
        "dilations": (1, 2),
    }
    with pytest.raises(error, match=message):
        causal_conv_stack(**(arguments | change))  # type: ignore[arg-type]


def test_mistakes_of_the_plain_conv_are_named() -> None:
    x = torch.zeros(2, 5, 4)
    with pytest.raises(ValueError, match=r"weight has shape \(3, 5, 4\); expected \(K, Din, Dout\) = \(any, 4, any\)"):
        dilated_causal_conv(x, torch.zeros(3, 5, 4), dilation=1)
    with pytest.raises(ValueError, match=r"bias has shape \(4,\); expected \(Dout,\) = \(7\)"):
        dilated_causal_conv(x, torch.zeros(3, 4, 7), torch.zeros(4), dilation=1)
