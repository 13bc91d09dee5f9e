"""Addresses past 2^31 elements, forward and backward, of every kernel: no GPU, and no memory of that size.

The launches of shapes that large run on meta tensors and stop at Triton's IR, where every integer has a width. From the
launch's own arguments and grid each integer gets the range it can take, and a 32-bit sum or product whose range leaves
32 bits is reported with its line: on a device it would be a finite, wrong address.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from .integer_ranges import Range, analyse

pytest.importorskip("triton")


@pytest.fixture
def overflows(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, set[str]]]:
    """A function that runs a callable on meta tensors and returns, for every kernel launched, the lines that overflow.

    `loaded` gives the range of the integers that a kernel reads from memory, by the name of its argument.
    """
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from goal_kernels import _launch

    target = GPUTarget("cuda", 90, 32)
    launch = JITFunction.run

    class Driver:
        """Stands where the CUDA driver stands. Kernels are cached per device: this one's hold IR alone."""

        def get_current_device(self) -> str:
            return "IR"

        def get_current_stream(self, device: str) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return target

    def to_ir(source, target, options, **_: object) -> str:
        backend = make_backend(target)
        options = backend.parse_options(dict(options))
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        functions = backend.get_codegen_implementation(options)
        module = source.make_ir(target, options, functions, backend.get_module_map(), context)
        return str(backend.make_ttir(module, {}, options, target.arch))

    def analyse_launches(function: Callable[[], object], loaded: Mapping[str, Range]) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}

        def record(self: Any, *arguments: Any, grid: tuple[int, ...], **options: Any) -> None:
            assert all(0 < size <= limit for size, limit in zip(grid, (2**31 - 1, 65535, 65535), strict=False)), grid
            _ = self.device_caches["IR"]  # the first look at it sets what compiles
            patch.setattr(self, "compile", to_ir)
            text = launch(self, *arguments, **options | {"warmup": True, "grid": grid})
            values = dict(zip(self.arg_names, arguments, strict=False)) | options
            found.setdefault(self.__name__, set()).update(analyse(text, values, grid, loaded))

        with monkeypatch.context() as patch:
            patch.setattr(driver, "_active", Driver())
            patch.setattr(_launch, "INTERPRETED_MULTIPROCESSORS", 132)  # as many as an H100 has
            patch.setattr(JITFunction, "run", record)
            _launch.multiprocessors.cache_clear()
            function()
        _launch.multiprocessors.cache_clear()
        return found

    return analyse_launches


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def check(found: dict[str, set[str]], kernels: set[str]) -> None:
    assert found.keys() >= kernels, f"not launched: {kernels - found.keys()}"
    # Its numbers are pairs and positions, which `supports` keeps below 2^31; it adds up ranges of which all but one
    # are zero, and that is more than ranges can tell.
    found.pop("sort_kernel", None)
    assert not any(found.values()), "\n".join(f"{name}: {line}" for name, lines in found.items() for line in lines)


def test_the_analysis_finds_what_overflows(overflows) -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(source, ids, stride, WIDE: tl.constexpr):
        row = tl.load(ids + tl.program_id(0))
        if WIDE:
            row = row.to(tl.int64)
        for step in range(4):
            tl.store(source + row * stride + step * 64 + tl.arange(0, 64), 0.0)

    def launch(rows: int, wide: bool) -> set[str]:
        ids = meta(8, dtype=torch.int32)
        found = overflows(lambda: kernel[(8,)](ids.bfloat16(), ids, 1024, WIDE=wide), {"ids": (0, rows)})
        return found["kernel"]

    assert not launch(2**20, False) and not launch(2**22, True)
    assert any("arith.muli" in line for line in launch(2**22, False))


def conv_stack(batch: int, length: int, channels: int, dtype: torch.dtype = torch.bfloat16, stride: int = 0) -> None:
    from goal_kernels.dilated_conv import triton_passes as passes

    x = meta(batch, length, channels, dtype=dtype)
    weights, vectors = meta(2, 3, channels, channels, dtype=dtype), [meta(2, channels, dtype=torch.float32)] * 3
    out, hidden, rstd = passes.stack(x, weights, *vectors, (1, 2), 1e-5, True)
    passes.stack_backward(x, x, hidden, out, rstd, weights, *vectors, (1, 2), 1e-5)


# all layers in one launch; a launch a layer with pointers and with descriptors; too wide for the fused block
@pytest.mark.parametrize(
    ("batch", "length", "channels", "kernels"),
    [
        (2**20, 100, 64, {"stack_kernel", "conv_kernel"}),
        (2**20, 200, 128, {"block_kernel", "weight_gradient_kernel"}),
        (2**17, 256, 256, {"wide_kernel", "wide_weight_gradient_kernel"}),
        (2**15, 200, 1000, {"norm_kernel", "conv_kernel"}),
    ],
)
def test_convolution_stack(overflows, batch: int, length: int, channels: int, kernels: set[str]) -> None:
    assert batch * length * channels > 2**31
    found = overflows(lambda: conv_stack(batch, length, channels), {})
    check(found, kernels | {"norm_backward_kernel", "sum_partials_kernel", "sum_vectors_kernel"})


def test_convolution_of_rows_far_apart(overflows) -> None:
    from goal_kernels.dilated_conv import triton_passes as passes

    stride = 2**23
    x = meta(1).as_strided((1, 2**20, 48), (0, stride, 1))
    grad = meta(1).as_strided((1, 2**20, 72), (0, stride, 1))
    weight, bias = meta(3, 48, 72), meta(72)

    def both() -> None:
        passes.conv(x, weight, bias, 2**20 - 1)
        passes.conv_backward(grad, x, weight, bias, 2**20 - 1)

    found = overflows(both, {})
    check(found, {"conv_kernel", "weight_gradient_kernel", "column_sum_kernel", "sum_partials_kernel"})


def experts(tokens: int, channels: int, hidden: int, experts: int, k: int, condition: Tensor) -> None:
    from goal_kernels.routed_experts import triton

    z, gate_weight = meta(tokens, channels), meta(experts, channels + condition.shape[1])
    matrices = (meta(experts, channels, hidden), meta(experts, hidden), meta(experts, hidden, channels))
    tensors = (z, condition, gate_weight, *matrices, meta(experts, channels))
    out, *routing = triton.experts_op._init_fn(*tensors, k, "gelu_tanh")
    weights, _, probabilities, _ = routing
    triton.experts_backward_op._init_fn(out, weights, probabilities, *tensors, *routing, "gelu_tanh")


ROUTER = {"gate_backward_kernel", "condition_backward_kernel", "gate_sum_kernel", "combine_kernel"}
SORTED = {"router_kernel", "sort_kernel", "hidden_backward_kernel", "grouped_matmul_kernel", "weight_gradient_kernel"}


@pytest.mark.parametrize(
    ("tokens", "channels", "hidden", "count", "k", "groups", "kernels"),
    [
        (2**25, 128, 512, 4, 2, 2**22, ROUTER | SORTED | {"experts_kernel"}),  # many tokens
        (2**15, 512, 2**15, 200, 4, 2**15, ROUTER | SORTED),  # large experts, two matmuls
        (64, 256, 2**15, 256, 2, 8, {"mixture_kernel", "hidden_backward_kernel", "weight_gradient_kernel"}),
        (16, 256, 2**15, 256, 2, 1, {"mixture_kernel"}),  # one launch
        (2**22, 1024, 64, 4, 2, 1, ROUTER | SORTED),  # one group: its gradient is summed by torch
    ],
)
def test_experts(
    overflows, tokens: int, channels: int, hidden: int, count: int, k: int, groups: int, kernels: set[str]
) -> None:
    from goal_kernels.routed_experts import _launches
    from goal_kernels.routed_experts._plan import plan

    assert max(tokens, count * hidden) * channels >= 2**31
    shape = plan(tokens, channels, hidden, count, k, torch.bfloat16, torch.device("meta"))
    per_program, programs = _launches.router_block(tokens)
    assert programs <= _launches.MAX_ROUTER_PROGRAMS
    loaded = {"experts_of": (-1, count - 1), "dispatch": (-1, shape.positions - 1), "counts": (0, per_program)}
    condition = meta(groups, 24)
    check(overflows(lambda: experts(tokens, channels, hidden, count, k, condition), loaded), kernels)
    check(
        overflows(lambda: experts(tokens, channels, hidden, count, k, condition[:1].expand(groups, 24)), loaded),
        kernels,
    )


def test_router_alone(overflows) -> None:
    from goal_kernels.routed_experts import triton

    tensors = meta(2**26, 48), meta(2**23, 24), meta(4, 72)

    def both() -> None:
        weights, experts, probabilities = triton.route_op._init_fn(*tensors, 2)
        triton.route_backward_op._init_fn(weights, probabilities, *tensors, weights, experts, probabilities)

    check(overflows(both, {"experts_of": (-1, 3)}), {"router_kernel", "gate_backward_kernel", "gate_sum_kernel"})


def test_more_pairs_than_32_bits_count_are_refused() -> None:
    from goal_kernels.routed_experts import triton

    assert triton.supports(meta(2**28, 8), 4, 4)
    assert not triton.supports(meta(2**29, 8), 4, 1)
    assert not triton.supports(meta(2**29, 8), 2, 4)


def test_conditions_far_apart(overflows) -> None:
    tokens, groups = 64, 8
    loaded = {"experts_of": (-1, 3)}
    for strides in ((2**31, 1), (1, 2**28)):
        condition = meta(1).as_strided((groups, 24), strides)
        found = overflows(lambda condition=condition: experts(tokens, 64, 64, 4, 2, condition), loaded)
        check(found, {"mixture_kernel", "condition_backward_kernel"})


@pytest.mark.parametrize("layout", ["contiguous", "vocabulary first", "steps first"])
@pytest.mark.parametrize(("kl", "ratio"), [("exact", "sequence"), ("k3", "token")])
def test_loss(overflows, layout: str, kl: str, ratio: str) -> None:
    from goal_kernels.scpo_loss import triton

    sequences, steps, vocabulary = 2**23, 8, 500
    logits = {
        "contiguous": meta(sequences, steps, vocabulary),
        "vocabulary first": meta(vocabulary, sequences, steps).permute(1, 2, 0),
        "steps first": meta(steps, sequences, vocabulary).transpose(0, 1),
    }[layout]
    each = meta(sequences, dtype=torch.float32)
    tokens = meta(sequences, steps, dtype=torch.int64)
    others = (tokens, tokens.float(), each.long(), each)

    def both() -> None:
        options = (0.2, 0.2, 0.1, kl == "exact", ratio == "token", True)
        _, _, gradient = triton.scpo_loss_op._init_fn(logits, logits, *others, *options)
        triton.scale_op._init_fn(gradient, each[0], 1.0)

    loaded = {"lengths": (0, steps), "tokens": (0, vocabulary - 1)}
    check(overflows(both, loaded), {"scpo_loss_kernel", "scpo_summary_kernel", "scale_kernel"})


def test_advantage(overflows) -> None:
    from goal_kernels.group_advantage import triton

    multipliers = meta(1).expand(7)
    for states, candidates in ((2**24, 40), (2**29, 3)):  # the groups, too, are more than 2^31
        reward = meta(states, 7, candidates)
        for cost in (reward, meta(candidates, 7, states).permute(2, 1, 0)):
            found = overflows(
                lambda reward=reward, cost=cost: triton.group_advantage_op._init_fn(
                    reward, cost, multipliers, 1e-6, 0.0
                ),
                {},
            )
            check(found, {"group_advantage_kernel"})
