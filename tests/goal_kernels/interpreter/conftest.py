"""Tests that run the real kernels on CPU tensors, in Triton's interpreter.

The interpreter must be chosen before Triton is imported, so these tests need a process of their own:
`TRITON_INTERPRET=1 pytest tests/goal_kernels/interpreter`. The ordinary run starts it (`test_interpreter.py`) and
collects nothing here itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def kernels_on_cpu() -> Iterator[None]:
    """The Triton backend for every op."""
    from goal_kernels.backend import set_backend

    set_backend("triton")
    yield
    set_backend("auto")


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds NaN, or an integer that no id or position reaches: an output that no kernel wrote shows."""

    def poisoned(allocate):
        def allocate_poisoned(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            if tensor.is_floating_point():
                return tensor.fill_(float("nan"))
            return tensor.fill_(torch.iinfo(tensor.dtype).max) if tensor.dtype in (torch.int32, torch.int64) else tensor

        return allocate_poisoned

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
