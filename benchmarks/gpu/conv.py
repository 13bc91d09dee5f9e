"""Convolution stack on a GPU: ours against plain torch, F.conv1d and torch.compile, each also as a CUDA graph.

python benchmarks/gpu/conv.py --out runs/gpu_check
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from measuring import Row, main, relative_error, upstream_of
from torch import Tensor

from goal_kernels import causal_conv_stack
from goal_kernels.dilated_conv import eager

DILATIONS = (1, 2, 4, 8)
DTYPE = torch.bfloat16
TAPS = 3
# batch, length, channels: floor and wanted ratio, forward and forward with backward (H100)
SHAPES = {
    (1024, 100, 128): ((0.05, 0.10 / 0.665), (0.17, 0.42 / 2.49)),
    (4096, 256, 256): ((2.06, 3.0 / 12.4), (6.2, 9.5 / 37.6)),
}
# sequences compared with fp64: enough for every kind of tile and for persistent programs to take several, few enough
# for fp64's memory and speed
COMPARED = 160


def arguments(batch: int, length: int, channels: int) -> list[Tensor]:
    """x, taps (bf16) and vectors (fp32), all needing gradients."""
    generator = torch.Generator("cuda").manual_seed(0)
    layers = len(DILATIONS)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    tensors = [
        random(batch, length, channels).to(DTYPE),
        (random(layers, TAPS, channels, channels) * (TAPS * channels) ** -0.5).to(DTYPE),
        random(layers, channels) * 0.1,
        1 + random(layers, channels) * 0.1,
        random(layers, channels) * 0.1,
    ]
    return [tensor.requires_grad_() for tensor in tensors]


def ours(*tensors: Tensor) -> Tensor:
    return causal_conv_stack(*tensors, DILATIONS)


def matmul_per_tap(x: Tensor, weights: Tensor, biases: Tensor, gains: Tensor, shifts: Tensor) -> Tensor:
    """What one would write: shifted matmuls in bf16."""
    channels = x.shape[-1]
    for layer, dilation in enumerate(DILATIONS):
        out = x + biases[layer].to(x.dtype) + x @ weights[layer, 0]
        for tap in range(1, TAPS):
            shift = tap * dilation
            out = out + F.pad(x[:, :-shift] @ weights[layer, tap], (0, 0, shift, 0))
        x = F.layer_norm(out, (channels,), gains[layer].to(x.dtype), shifts[layer].to(x.dtype))
    return x


def conv1d(x: Tensor, weights: Tensor, biases: Tensor, gains: Tensor, shifts: Tensor) -> Tensor:
    """The library's convolution, channels before positions."""
    channels = x.shape[-1]
    for layer, dilation in enumerate(DILATIONS):
        padded = F.pad(x.transpose(1, 2), (dilation * (TAPS - 1), 0))
        kernel = weights[layer].flip(0).permute(2, 1, 0)
        out = x + F.conv1d(padded, kernel, biases[layer].to(x.dtype), dilation=dilation).transpose(1, 2)
        x = F.layer_norm(out, (channels,), gains[layer].to(x.dtype), shifts[layer].to(x.dtype))
    return x


def with_backward(function: Callable[..., Tensor], tensors: list[Tensor], upstream: Tensor) -> list[Tensor]:
    out = function(*tensors)
    return [out, *torch.autograd.grad(out, tensors, upstream)]


def forward_only(function: Callable[..., Tensor], tensors: list[Tensor]) -> Tensor:
    with torch.no_grad():
        return function(*tensors)


def errors(shape: tuple[int, int, int], backward: bool) -> dict[str, float]:
    """Relative errors against fp64 on the first sequences, of the output and, with backward, of all gradients."""
    tensors = arguments(*shape)
    tensors[0] = tensors[0].detach()[:COMPARED].requires_grad_()
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]

    def truth(*values: Tensor) -> Tensor:
        return eager.causal_conv_stack(*values, DILATIONS, 1e-5)

    names = ["out", "x", "weights", "biases", "norm_weights", "norm_biases"]
    if not backward:
        return {"out": relative_error(forward_only(ours, tensors), forward_only(truth, exact))}
    upstream = upstream_of(tensors[0])
    values = with_backward(ours, tensors, upstream)
    wanted = with_backward(truth, exact, upstream.double())
    return {name: relative_error(*pair) for name, *pair in zip(names, values, wanted, strict=True)}


def prepare(
    shape: tuple[int, int, int], backward: bool
) -> tuple[dict[str, Callable[[], object]], dict[str, Callable[[], object]]]:
    """Functions to time. torch.compile without its own CUDA graphs: those are captured for all alike."""
    tensors = arguments(*shape)
    upstream = upstream_of(tensors[0])
    torch.compiler.reset()

    def timed(function: Callable[..., Tensor]) -> Callable[[], object]:
        return (
            partial(with_backward, function, tensors, upstream)
            if backward
            else partial(forward_only, function, tensors)
        )

    peers = {"matmuls": matmul_per_tap, "conv1d": conv1d, "compiled matmuls": torch.compile(matmul_per_tap)}
    if not backward:
        peers["compiled conv1d"] = torch.compile(conv1d)
    return {"ours": timed(ours)}, {name: timed(function) for name, function in peers.items()}


def rows() -> list[Row]:
    """The table's rows."""
    table = []
    for shape, limits in SHAPES.items():
        for backward, (floor, goal) in zip((False, True), limits, strict=True):
            batch, length, channels = shape
            work = "forward+backward" if backward else "forward"
            name = f"conv x4 {work}, B{batch} L{length} D{channels}"
            checks, functions = partial(errors, shape, backward), partial(prepare, shape, backward)
            table.append(Row(name, DTYPE, floor, {"any": goal}, checks, functions))
    return table


if __name__ == "__main__":
    main(rows(), "conv")
