"""Addresses past 2^31 elements, forward and backward, of every kernel: no GPU, and no memory of that size.

The launches of shapes that large run on meta tensors and stop at Triton's IR, where every integer has a width. From the
launch's own arguments and grid each integer gets the range it can take, and a 32-bit sum or product whose range leaves
32 bits is reported with its line: on a device it would be a finite, wrong address.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

Range = tuple[int, int]
NAME = r"%[\w.\-]+(?:#\d+)?"
COMPARE = {
    "slt": lambda a, b: (a[1] < b[0], a[0] >= b[1]),
    "sle": lambda a, b: (a[1] <= b[0], a[0] > b[1]),
    "sgt": lambda a, b: (a[0] > b[1], a[1] <= b[0]),
    "sge": lambda a, b: (a[0] >= b[1], a[1] < b[0]),
    "eq": lambda a, b: (a[0] == a[1] == b[0] == b[1], a[1] < b[0] or b[1] < a[0]),
    "ne": lambda a, b: (a[1] < b[0] or b[1] < a[0], a[0] == a[1] == b[0] == b[1]),
}
# operations whose result has the range of their operand
SAME = (
    "tt.splat",
    "tt.broadcast",
    "tt.expand_dims",
    "tt.reshape",
    "tt.trans",
    "tt.split",
    "arith.extsi",
    "arith.extui",
)


@dataclass
class Operation:
    results: list[str]
    name: str
    text: str
    regions: list[list[Operation]] = field(default_factory=list)


def parse(lines: list[str]) -> list[Operation]:
    """Operations up to the brace that closes their region; `lines` is consumed."""
    operations = []
    while lines:
        line = lines.pop(0).strip()
        if line.startswith("}"):
            lines.insert(0, line)
            return operations
        match = re.match(rf'(?:({NAME}(?::\d+)?(?:, {NAME})*) = )?"?([a-z]+\.[\w.]+)"?(.*)', line)
        if not match:  # a label
            continue
        results, name, text = match.groups()
        names = re.findall(rf"({NAME})(?::(\d+))?", results or "")
        several = [f"{first}#{i}" for first, count in names if count for i in range(int(count))]
        operation = Operation(several or [first for first, _ in names], name, text)
        while text.endswith("{"):
            operation.regions.append(parse(lines))
            text = lines.pop(0)
            operation.text += " " + text
        operations.append(operation)
    return operations


class Ranges:
    """What the integers of one launch can be; `problems` are the lines that overflow."""

    def __init__(self, grid: tuple[int, ...], loaded: Mapping[str, Range]) -> None:
        self.grid = (*grid, 1, 1)[:3]
        self.loaded = loaded
        self.problems: set[str] = set()

    def fits(self, value: Range | None, bits: int, operation: Operation) -> Range | None:
        if value is None or (-(2 ** (bits - 1)) <= value[0] and value[1] < 2 ** max(bits - 1, 1)):
            return value
        self.problems.add(f"{' '.join(operation.results)} = {operation.name}{operation.text} in {value}")
        return None

    def run(self, operations: list[Operation], known: dict[str, Any]) -> list[Any]:
        """Fill in `known`, name to range (a pointer: to the arguments it comes from); what the region yields."""
        for operation in operations:
            names = re.findall(NAME, operation.text)
            if operation.name.endswith((".yield", "reduce.return", "scan.return")):
                return [known.get(name) for name in names]
            if operation.name == "scf.for":
                values = self.loop(operation, known)
            elif operation.name == "scf.if":
                values = self.branch(operation, known[names[0]], known)
            else:
                values = [self.value(operation, [known.get(name) for name in names])] * len(operation.results)
            known.update(zip(operation.results, values, strict=True))
        return []

    def value(self, operation: Operation, operands: list[Any]) -> Any:
        name, text = operation.name, operation.text
        bits = int(next(iter(re.findall(r"i(\d+)>*(?: *\{.*\})?$", text)), 0))
        if name == "arith.constant":
            number = re.match(r" (?:dense<)?(-?\d+|true|false)>? ?(?::|$)", text)
            if number is None or "f32" in text or "f16" in text or "f64" in text:
                return None
            return (int({"true": "1", "false": "0"}.get(number[1], number[1])),) * 2
        if name == "tt.make_range":
            return int(re.findall(r"start = (\d+)", text)[0]), int(re.findall(r"end = (\d+)", text)[0]) - 1
        if name in ("tt.get_program_id", "tt.get_num_programs"):
            size = self.grid["xyz".index(text.split()[0])]
            return (0, size - 1) if name == "tt.get_program_id" else (size, size)
        if name == "tt.addptr":
            if not isinstance(operands[1], tuple):
                self.problems.add(f"unknown offset: {name}{text}")
            return operands[0]
        if name == "tt.load":
            if not re.search(r"ptr<i\d+>>*$", text) or operands[0] is None:
                return None
            ranges = [self.loaded[source] for source in operands[0]]
            return union(*ranges, *operands[2:3])
        if name == "arith.extsi" and re.search(r": (tensor<[\dx]*)?i1>? to", text):
            return (-1, 0)
        if name in SAME:
            return operands[0]
        if name == "arith.trunci":
            return self.fits(operands[0], bits, operation)
        if name == "arith.select":
            condition, yes, no = operands
            return union(yes, no) if condition in ((0, 1), None) else yes if condition == (1, 1) else no
        if name in ("tt.reduce", "tt.scan"):
            return self.reduce(operation, operands[0], bits)
        if name not in INTEGER or None in operands or not all(isinstance(part, tuple) for part in operands):
            return None
        if name == "arith.cmpi":
            always, never = COMPARE[text.split(",")[0].strip()](*operands)
            return (1, 1) if always else (0, 0) if never else (0, 1)
        return self.fits(INTEGER[name](*operands), bits, operation)

    def reduce(self, operation: Operation, operand: Any, bits: int) -> Range | None:
        if operand is None or bits == 0:
            return None
        combine = [inner.name for inner in operation.regions[0]]
        if "arith.addi" not in combine:
            return operand
        axis = int(re.findall(r"axis = (\d+)", operation.text)[0])
        size = int(re.findall(r": \(tensor<([\dx]+)x", operation.text)[0].split("x")[axis])
        return self.fits((min(operand[0], size * operand[0]), max(operand[1], size * operand[1])), bits, operation)

    def branch(self, operation: Operation, condition: Any, known: dict[str, Any]) -> list[Any]:
        regions = operation.regions
        taken = regions[:1] if condition == (1, 1) else regions[1:] if condition == (0, 0) else regions
        yields = [self.run(region, known) for region in taken]
        return [union(*values) for values in zip(*yields, strict=True)] or [None] * len(operation.results)

    def loop(self, operation: Operation, known: dict[str, Any]) -> list[Any]:
        """A counted loop. Sums carried from turn to turn grow by what one turn adds, as often as there are turns."""
        header = operation.text.split("{")[0]
        counter, first, last, step = re.match(rf" ({NAME}) = ({NAME}) to ({NAME}) step ({NAME})", header).groups()
        carried = re.findall(rf"({NAME}) = ({NAME})", header.partition("iter_args")[2])
        start = [known.get(value) for _, value in carried]
        lowest, highest, stride = known.get(first), known.get(last), known.get(step)
        if None in (lowest, highest, stride):
            self.problems.add(f"unknown number of turns: {header}")
            lowest, highest, stride = (0, 0), (1, 1), (1, 1)
        turns = -(-(highest[1] - lowest[0]) // stride[0])
        if turns <= 0:
            return start
        bits = int(re.findall(r": i(\d+) ", header + " ")[-1])
        known[counter] = lowest[0], highest[1] - 1
        self.fits((lowest[0], highest[1] - 1 + stride[1]), bits, operation)
        now = start
        for _ in range(2):
            known.update(zip([name for name, _ in carried], now, strict=True))
            after = self.run(operation.regions[0], known)
            if now is start:
                grown = [grow(before, value, turns - 1) for before, value in zip(start, after, strict=True)]
                now = grown
        return [union(before, value) for before, value in zip(now, after, strict=True)]


def grow(before: Any, after: Any, turns: int) -> Any:
    if not isinstance(before, tuple) or not isinstance(after, tuple):
        return before if before == after else None
    return before[0] + turns * min(0, after[0] - before[0]), before[1] + turns * max(0, after[1] - before[1])


def union(*values: Any) -> Any:
    if any(value is None for value in values):
        return None
    if all(isinstance(value, frozenset) for value in values):
        return frozenset().union(*values)
    return min(value[0] for value in values), max(value[1] for value in values)


def corners(function: Callable[[int, int], int]) -> Callable[[Range, Range], Range]:
    def of_ranges(a: Range, b: Range) -> Range:
        values = [function(x, y) for x in a for y in b]
        return min(values), max(values)

    return of_ranges


def divide(a: Range, b: Range) -> Range | None:
    return corners(lambda x, y: abs(x) // y * (1 if x >= 0 else -1))(a, b) if b[0] > 0 else None


def remainder(a: Range, b: Range) -> Range | None:
    if b[0] <= 0:
        return None
    return (0, min(a[1], b[1] - 1)) if a[0] >= 0 else (1 - b[1], b[1] - 1)


def conjunction(a: Range, b: Range) -> Range | None:
    return (0, min(a[1], b[1])) if min(a[0], b[0]) >= 0 else None


INTEGER: dict[str, Callable[..., Range | None]] = {
    "arith.cmpi": lambda a, b: None,
    "arith.addi": corners(lambda x, y: x + y),
    "arith.subi": corners(lambda x, y: x - y),
    "arith.muli": corners(lambda x, y: x * y),
    "arith.minsi": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "arith.maxsi": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "arith.divsi": divide,
    "arith.remsi": remainder,
    "arith.andi": conjunction,
    "arith.ori": lambda a, b: (0, 1) if min(a[0], b[0]) >= 0 and max(a[1], b[1]) <= 1 else None,
    "arith.xori": lambda a, b: (0, 1) if max(a[1], b[1]) <= 1 else None,
}


def analyse(ir: str, arguments: Mapping[str, Any], grid: tuple[int, ...], loaded: Mapping[str, Range]) -> set[str]:
    """Lines of a kernel's IR that overflow, for these arguments and this grid."""
    ir = re.sub(r" loc\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)", "", ir)
    lines = [line for line in ir.splitlines() if not line.startswith("#")]
    header = next(line for line in lines if "tt.func" in line)
    known: dict[str, Any] = {}
    for name, kind in re.findall(r"(%[\w.]+): (!tt\.ptr|i\d+)", header):
        if kind == "!tt.ptr":
            known[name] = frozenset([name[1:]])
        elif isinstance(arguments.get(name[1:]), int):
            known[name] = (arguments[name[1:]],) * 2
    ranges = Ranges(grid, loaded)
    ranges.run(parse(lines[lines.index(header) + 1 :]), known)
    return ranges.problems


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
    steps, programs = _launches.router_block(tokens)
    per_program = steps * _launches.ROUTER_ROWS
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

    reward, multipliers = meta(2**24, 7, 40), meta(1).expand(7)
    turned = meta(40, 7, 2**24).permute(2, 1, 0)
    for cost in (reward, turned):
        found = overflows(
            lambda cost=cost: triton.group_advantage_op._init_fn(reward, cost, multipliers, 1e-6, 0.0), {}
        )
        check(found, {"group_advantage_kernel"})
