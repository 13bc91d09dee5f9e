"""Launches of the Triton kernels: memory, grids and the order of the passes.

Functions here take checked tensors of any strides, allocate every output and run on the input's device. Inputs whose
rows do not lie at one stride, channels side by side, are copied once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from goal_kernels.dilated_conv import configurations as table
from goal_kernels.dilated_conv.triton_backward import (
    column_sum_kernel,
    norm_backward_kernel,
    sum_partials_kernel,
    sum_vectors_kernel,
    weight_gradient_kernel,
)
from goal_kernels.dilated_conv.triton_forward import block_kernel, conv_kernel, norm_kernel, stack_kernel

# Kernels that were defined under TRITON_INTERPRET=1 are run by the interpreter for good.
INTERPRETED = type(conv_kernel).__name__ == "InterpretedFunction"
# Tile offsets are 32-bit: 128 rows of this stride stay far below 2^31.
LARGEST_ROW_STRIDE = 2**22


def conv(x: Tensor, weight: Tensor, bias: Tensor | None, dilation: int) -> Tensor:
    """(B, L, Dout) of x (B, L, Din), weight (K, Din, Dout)."""
    out = x.new_empty(x.shape[0], x.shape[1], weight.shape[2])
    with on_device(x):
        _convolve(_rows(x), weight.contiguous(), bias, out, x.shape[1], dilation)
    return out


def conv_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, dilation: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias (empty where there is none)."""
    grad_x, grad_weight = x.new_empty(x.shape), weight.new_empty(weight.shape)
    grad_bias = x.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    with on_device(x):
        grad, x = _rows(grad), _rows(x)
        length = grad_x.shape[1]
        _convolve(grad, weight.contiguous(), None, grad_x, length, dilation, reverse=True)
        _weight_gradient(x, x, grad, grad_weight.unsqueeze(0), length, (dilation,), 0)
        if bias is not None:
            _column_sum(grad, grad_bias)
    return grad_x, grad_weight, grad_bias


def stack(
    x: Tensor,
    weights: Tensor,
    biases: Tensor,
    norm_weights: Tensor,
    norm_biases: Tensor,
    dilations: Sequence[int],
    eps: float,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, hidden (J-1, B, L, D) and rstd (J, B, L); the latter two are empty unless `keep`."""
    layers = len(dilations)
    kept = layers if keep else 0
    out = x.new_empty(x.shape)
    hidden = x.new_empty(max(kept - 1, 0), *x.shape)
    rstd = x.new_empty(kept, *x.shape[:2], dtype=torch.float32)
    if out.numel() == 0:
        return out, hidden, rstd.zero_()
    length, channels = x.shape[1:]
    with on_device(x):
        rows = _rows(x)
        parameters = [tensor.contiguous() for tensor in (weights, biases, norm_weights, norm_biases)]
        if layers > 1 and length <= table.STACK_LENGTH and channels <= table.FUSED_CHANNELS:
            _stack_at_once(rows, *parameters, hidden, out, rstd, length, dilations, eps, keep)
        else:
            scratch = [out, x.new_empty(x.shape) if layers > 1 and not keep else out]
            for layer, dilation in enumerate(dilations):
                if layer == layers - 1:
                    target = out
                else:
                    target = hidden[layer] if keep else scratch[(layers - 1 - layer) % 2]
                vectors = [parameter[layer] for parameter in parameters]
                _block(rows, *vectors, target, rstd[layer] if keep else None, length, dilation, eps)
                rows = target.view(-1, channels)
    return out, hidden, rstd


def stack_backward(
    grad: Tensor,
    x: Tensor,
    hidden: Tensor,
    out: Tensor,
    rstd: Tensor,
    weights: Tensor,
    biases: Tensor,
    norm_weights: Tensor,
    norm_biases: Tensor,
    dilations: Sequence[int],
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weights, biases, norm weights and norm biases."""
    grads = [
        tensor.new_empty(tensor.shape) for tensor in (x, weights, biases, norm_weights, norm_biases)
    ]
    grad_x, grad_weights, grad_biases, grad_norm_weights, grad_norm_biases = grads
    if x.numel() == 0:
        return tuple(tensor.zero_() for tensor in grads)  # type: ignore[return-value]
    layers, (length, channels) = len(dilations), x.shape[1:]
    with on_device(x):
        source = _rows(x)
        rows = source.shape[0]
        weights, biases, norm_weights, norm_biases = (
            tensor.contiguous() for tensor in (weights, biases, norm_weights, norm_biases)
        )
        normalised = torch.empty_like(out)
        at_once = layers * out.numel() * out.element_size() <= table.KEPT_GRADIENT_BYTES
        inner = x.new_empty(layers if at_once else 1, rows, channels)
        programs, tiles, block_rows = _row_split(rows, channels)
        partials = x.new_empty(programs, 3, layers, channels, dtype=torch.float32)
        upstream = _rows(grad)
        for layer in reversed(range(layers)):
            vectors = [parameter[layer] for parameter in (weights, biases, norm_weights, norm_biases)]
            before = source if layer == 0 else hidden[layer - 1].view(-1, channels)
            _block(before, *vectors, normalised, None, length, dilations[layer], eps, recompute=True)
            slab = inner[layer if at_once else 0]
            norm_backward_kernel[(programs,)](
                upstream,
                out if layer == layers - 1 else hidden[layer],
                normalised,
                rstd[layer],
                vectors[2],
                vectors[3],
                slab,
                partials[0, 0, layer],
                rows,
                tiles,
                upstream.stride(0),
                layers * channels,
                CHANNELS=channels,
                BLOCK_ROWS=block_rows,
                BLOCK=table.power_of_two(channels),
                num_warps=4,
            )
            target = grad_x if layer == 0 else x.new_empty(x.shape)
            _convolve(slab, vectors[0], None, target, length, dilations[layer], reverse=True, residual=True)
            upstream = target.view(-1, channels)
            if not at_once:
                _weight_gradient(source, hidden, slab, grad_weights[layer : layer + 1], length, dilations, layer)
        if at_once:
            _weight_gradient(source, hidden, inner, grad_weights, length, dilations, 0)
        count = layers * channels
        parts, block = _sum_block(programs)
        sum_vectors_kernel[(-(-count // block), 3)](
            partials, grad_norm_weights, grad_norm_biases, grad_biases, count, programs, PARTS=parts, BLOCK=block
        )
    return grad_x, grad_weights, grad_biases, grad_norm_weights, grad_norm_biases


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device; make that the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def _rows(tensor: Tensor) -> Tensor:
    """(B, L, D) as (B * L, D) with channels side by side and rows at one stride: a view where possible."""
    batch, length, channels = tensor.shape
    stride = tensor.stride(1)
    flat = batch <= 1 or tensor.stride(0) == length * stride
    if flat and tensor.stride(2) == 1 and channels <= stride <= LARGEST_ROW_STRIDE:
        return tensor.as_strided((batch * length, channels), (stride, 1))
    return tensor.contiguous().view(batch * length, channels)


def _shifts(dilations: Sequence[int], taps: int) -> tuple[int, ...]:
    """Dilations cut to where the furthest tap's shift still fits 32 bits; it is past every position anyway."""
    return tuple(min(dilation, 2**30 // taps) for dilation in dilations)


def _precision(tensor: Tensor) -> str:
    # Three tf32 products keep fp32's accuracy on the matrix units; 16-bit products are exact.
    return "tf32x3" if tensor.dtype == torch.float32 else "tf32"


def _convolve(
    source: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    length: int,
    dilation: int,
    *,
    reverse: bool = False,
    residual: bool = False,
    guard: tuple[Tensor, Tensor] | None = None,
) -> None:
    """out = taps(source) with bias and source added on request; `reverse`: transposed taps looking ahead."""
    taps, channels_in, channels_out = weight.shape
    stride_in, stride_out = channels_out, 1
    if reverse:
        channels_in, channels_out = channels_out, channels_in
        stride_in, stride_out = stride_out, stride_in
    rows = source.shape[0]
    if out.numel() == 0:
        return
    if channels_in == 0:
        # nothing to sum: what remains is the bias
        out.zero_() if bias is None else out.copy_(bias.expand(out.shape))
        return
    tile = table.conv_tile(channels_in, channels_out, source.dtype, interpreted=INTERPRETED)
    columns = -(-channels_out // tile.columns)
    conv_kernel[(-(-rows // tile.rows) * columns,)](
        source,
        weight,
        bias,
        out,
        rows,
        length,
        *_shifts((dilation,), taps),
        source.stride(0),
        weight.stride(0),
        stride_in,
        stride_out,
        columns,
        *(guard or (None, None)),
        IN=channels_in,
        OUT=channels_out,
        TAPS=taps,
        REVERSE=reverse,
        HAS_BIAS=bias is not None,
        RESIDUAL=residual,
        GUARD=guard is not None,
        GUARD_BLOCK=table.power_of_two(channels_out),
        BLOCK_ROWS=tile.rows,
        BLOCK_OUT=tile.columns,
        BLOCK_IN=tile.depth,
        PRECISION=_precision(source),
        **tile.options(),
    )


def _block(
    source: Tensor,
    weight: Tensor,
    bias: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    out: Tensor,
    rstd: Tensor | None,
    length: int,
    dilation: int,
    eps: float,
    *,
    recompute: bool = False,
) -> None:
    """One layer into `out`; `recompute`: only the normalised rows, and only where the device finds them needed."""
    rows, channels = source.shape
    taps = weight.shape[0]
    if channels > table.FUSED_CHANNELS:
        inner = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        guard = (norm_weight, norm_bias) if recompute else None
        _convolve(source, weight, bias, inner, length, dilation, residual=True, guard=guard)
        norm_kernel[(rows,)](
            inner,
            norm_weight,
            norm_bias,
            out,
            rstd,
            rows,
            eps,
            CHANNELS=channels,
            AFFINE=not recompute,
            KEEP=rstd is not None,
            GUARD=recompute,
            BLOCK=table.power_of_two(channels),
        )
        return
    tile = table.block_tile(channels, source.dtype, interpreted=INTERPRETED)
    tiles = -(-rows // tile.rows)
    block_kernel[(min(tiles, table.GUARD_PROGRAMS) if recompute else tiles,)](
        source,
        weight,
        bias,
        norm_weight,
        norm_bias,
        out,
        rstd,
        rows,
        length,
        *_shifts((dilation,), taps),
        source.stride(0),
        eps,
        CHANNELS=channels,
        TAPS=taps,
        AFFINE=not recompute,
        KEEP=rstd is not None,
        GUARD=recompute,
        BLOCK_ROWS=tile.rows,
        BLOCK_OUT=tile.columns,
        BLOCK_IN=tile.depth,
        PRECISION=_precision(source),
        **tile.options(),
    )


def _stack_at_once(
    source: Tensor,
    weights: Tensor,
    biases: Tensor,
    norm_weights: Tensor,
    norm_biases: Tensor,
    hidden: Tensor,
    out: Tensor,
    rstd: Tensor,
    length: int,
    dilations: Sequence[int],
    eps: float,
    keep: bool,
) -> None:
    rows, channels = source.shape
    tile = table.block_tile(channels, source.dtype, interpreted=INTERPRETED)
    span = max(1, tile.rows // length) * length
    stack_kernel[(-(-rows // span),)](
        source,
        weights,
        biases,
        norm_weights,
        norm_biases,
        hidden if keep else torch.empty_like(out),
        out,
        rstd,
        rows,
        length,
        span,
        source.stride(0),
        eps,
        DILATIONS=_shifts(dilations, weights.shape[1]),
        CHANNELS=channels,
        TAPS=weights.shape[1],
        KEEP=keep,
        BLOCK_ROWS=tile.rows,
        BLOCK_OUT=tile.columns,
        BLOCK_IN=tile.depth,
        PRECISION=_precision(source),
        **tile.options(),
    )


def _weight_gradient(
    x: Tensor,
    hidden: Tensor,
    grad: Tensor,
    out: Tensor,
    length: int,
    dilations: Sequence[int],
    first_layer: int,
) -> None:
    """Gradient of the taps of `out.shape[0]` layers from `first_layer` on, into out (layers, K, Din, Dout)."""
    layers, taps, channels_in, channels_out = out.shape
    rows = x.shape[0]
    if out.numel() == 0 or rows == 0:
        out.zero_()
        return
    tile = table.weight_tile(channels_in, channels_out, x.dtype, interpreted=INTERPRETED)
    jobs = layers * taps * -(-channels_in // tile.rows) * -(-channels_out // tile.columns)
    splits = max(1, min(table.WEIGHT_PROGRAMS // jobs, -(-rows // (8 * tile.depth))))
    steps = -(-rows // (splits * tile.depth))
    partials = x.new_empty(splits, *out.shape, dtype=torch.float32)
    weight_gradient_kernel[(jobs * splits,)](
        x,
        hidden,
        grad,
        partials,
        rows,
        length,
        steps,
        splits,
        first_layer,
        x.stride(0),
        grad.stride(-2),
        DILATIONS=_shifts(dilations, taps),
        IN=channels_in,
        OUT=channels_out,
        TAPS=taps,
        BLOCK_IN=tile.rows,
        BLOCK_OUT=tile.columns,
        BLOCK_ROWS=tile.depth,
        PRECISION=_precision(x),
        **tile.options(),
    )
    _sum(partials, out)


def _row_split(rows: int, channels: int) -> tuple[int, int, int]:
    """Programs, tiles per program and rows per tile of a sum over rows."""
    block_rows = table.norm_rows(channels, interpreted=INTERPRETED)
    tiles = -(-rows // block_rows)
    programs = min(tiles, 3 if INTERPRETED else table.NORM_PROGRAMS)
    return programs, -(-tiles // programs), block_rows


def _column_sum(values: Tensor, out: Tensor) -> None:
    rows, channels = values.shape
    if rows == 0 or channels == 0:
        out.zero_()
        return
    programs, tiles, block_rows = _row_split(rows, channels)
    partials = values.new_empty(programs, channels, dtype=torch.float32)
    column_sum_kernel[(programs,)](
        values,
        partials,
        rows,
        tiles,
        values.stride(0),
        CHANNELS=channels,
        BLOCK_ROWS=block_rows,
        BLOCK=table.power_of_two(channels),
    )
    _sum(partials, out)


def _sum_block(parts: int) -> tuple[int, int]:
    return min(64, table.power_of_two(parts)), 64


def _sum(partials: Tensor, out: Tensor) -> None:
    parts, block = _sum_block(partials.shape[0])
    sum_partials_kernel[(-(-out.numel() // block),)](
        partials, out, out.numel(), partials.shape[0], PARTS=parts, BLOCK=block
    )
