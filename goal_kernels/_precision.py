"""The number formats ops compute in, and how they follow autocast.

Ops do not use `torch.library.register_autocast`: it casts every input to one fixed dtype, while an op here follows the
dtype of the autocast region in force and leaves biases and norm parameters in fp32.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, else fp32: what the eager implementations compute in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as a matmul under the autocast region in force would see them; unchanged outside one.

    As torch does, fp64 is left alone.
    """
    device = tensors[0].device.type
    if not autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors)


def autocast_enabled(device: str) -> bool:
    """Whether an autocast region for this device type is in force; False for devices without autocast."""
    return device in ("cpu", "cuda") and torch.is_autocast_enabled(device)


def without_autocast(device: str) -> contextlib.AbstractContextManager[object]:
    """A region in which torch keeps the dtypes it is given."""
    if autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()
