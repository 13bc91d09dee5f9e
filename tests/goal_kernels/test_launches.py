"""Where and how kernels are launched, seen without a GPU: the host code runs on meta tensors and launches nothing."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import goal_kernels

PACKAGE = Path(goal_kernels.__file__).parent
LAUNCHING = ("dilated_conv.triton_passes", "routed_experts.triton", "scpo_loss.triton", "group_advantage.triton")


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels launched; an error where the device is not the input's, or where the host waits for it."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    current, names = ["cuda:0"], []

    @contextlib.contextmanager
    def on_device_of(tensor: Tensor) -> Iterator[None]:
        current.append(str(tensor.device))
        yield
        current.pop()

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    def run(self: JITFunction, *_: object, **__: object) -> None:
        assert current[-1] == "meta", f"{self.__name__} is launched on the current device, not on the input's"
        names.append(self.__name__)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a synchronisation with the device, which the capture of a graph forbids")

    for module in LAUNCHING:
        monkeypatch.setattr(importlib.import_module(f"goal_kernels.{module}"), "on_device_of", on_device_of)
    monkeypatch.setattr(driver, "_active", Driver())
    monkeypatch.setattr(JITFunction, "run", run)
    for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"):
        monkeypatch.setattr(Tensor, name, refuse)
    return names


# all layers in one launch, descriptors, a launch a layer, LayerNorm in a launch of its own
@pytest.mark.parametrize(("length", "channels"), [(100, 128), (256, 256), (200, 100), (20, 520)])
def test_convolutions(launched: list[str], length: int, channels: int) -> None:
    from goal_kernels.dilated_conv import triton_passes as passes

    x, weights, vectors = meta(4, length, channels), meta(2, 3, channels, channels), [meta(2, channels)] * 3
    out, hidden, rstd = passes.stack(x, weights, *vectors, (1, 2), 1e-5, True)
    passes.stack_backward(x, x, hidden, out, rstd, weights, *vectors, (1, 2), 1e-5)
    passes.conv(x, weights[0], vectors[0][0], 2)
    passes.conv_backward(x, x, weights[0], vectors[0][0], 2)
    assert {"conv_kernel", "norm_backward_kernel", "column_sum_kernel", "sum_vectors_kernel"} <= set(launched)


# one launch, dense, sorted, two matmuls
@pytest.mark.parametrize(("tokens", "channels"), [(8, 128), (4096, 128), (40000, 128), (40000, 512)])
def test_experts(launched: list[str], tokens: int, channels: int) -> None:
    from goal_kernels.routed_experts import triton

    router = meta(tokens, channels), meta(tokens // 8, 24), meta(4, channels + 24)
    tensors = (*router, meta(4, channels, 512), meta(4, 512), meta(4, 512, channels), meta(4, channels))
    out, *routing = triton.experts_op._init_fn(*tensors, 2, "gelu_tanh")
    triton.experts_backward_op._init_fn(out, routing[0], routing[2], *tensors, *routing, "gelu_tanh")
    weights, experts, probabilities = triton.route_op._init_fn(*router, 2)
    triton.route_backward_op._init_fn(weights, probabilities, *router, weights, experts, probabilities)
    assert {"router_kernel", "hidden_backward_kernel", "weight_gradient_kernel"} <= set(launched)


def test_loss_and_advantage(launched: list[str]) -> None:
    from goal_kernels.group_advantage import triton as advantage
    from goal_kernels.scpo_loss import triton as loss

    logits, tokens = meta(64, 8, 24), meta(64, 8, dtype=torch.int64)
    others = (tokens, tokens.float(), tokens[:, 0], tokens[:, 0].float(), 0.2, 0.2, 0.1, True, False, True)
    _, _, gradient = loss.scpo_loss_op._init_fn(logits, logits, *others)
    loss.scale_op._init_fn(gradient, meta(), 1.0)
    advantage.group_advantage_op._init_fn(meta(30, 7, 16), meta(30, 7, 16), meta(7), 1e-6, 0.0)
    assert launched == ["scpo_loss_kernel", "scpo_summary_kernel", "scale_kernel", "group_advantage_kernel"]


def test_nothing_is_tuned_when_it_runs() -> None:
    """Tuning would run again for each new length, and break the capture of a graph."""
    for path in PACKAGE.rglob("*.py"):
        assert "autotune" not in path.read_text(), path
