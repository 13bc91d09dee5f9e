"""What every launch needs: the right device, its size, and whether the kernels are interpreted."""

from __future__ import annotations

import contextlib
import functools

import torch
import triton
from torch import Tensor

# Where kernels run in Triton's interpreter, CUDA assembly and 16-bit arithmetic are not available.
INTERPRETING = bool(triton.knobs.runtime.interpret)  # pyright: ignore[reportAttributeAccessIssue]

# Programs of a grid-stride kernel in the interpreter: more than one, so that striding is exercised.
INTERPRETED_MULTIPROCESSORS = 2


def on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Make the device of `tensor` the current one: Triton launches on the current device, whatever the arguments."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def within_32_bits(tensor: Tensor, axis: int) -> Tensor:
    """`tensor`, copied where elements along `axis` lie too far apart for the 32-bit offsets that kernels use there.

    Twice the size, since a tile may reach up to the next power of two.
    """
    return tensor.contiguous() if 2 * tensor.shape[axis] * tensor.stride(axis) >= 2**31 else tensor


def packed(tensor: Tensor) -> Tensor:
    """`tensor`, copied where it is not contiguous or does not start on 16 bytes: descriptors cannot take such a start,
    and pointer loads fall apart into single elements, whose addresses take the registers of a large tile."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device."""
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def capability(device: torch.device) -> int:
    """Compute capability of a CUDA device, 90 for an H100; elsewhere (interpreter, builds) 90 is assumed."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def most_registers(num_warps: int) -> int:
    """Registers a thread can have, for a launch's `maxnreg` where ptxas must not choose: left alone it stops at the
    count with which one program more fits a multiprocessor, and spills what that leaves over, often a mere 8 bytes."""
    return min(255, 65536 // (32 * num_warps))
