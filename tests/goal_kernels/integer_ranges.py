"""The range that each integer of a kernel's IR can take, and where 32 bits are too few for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

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
