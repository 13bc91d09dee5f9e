"""What the GPU tables share: parity first, then interleaved medians, printed rows and JSON.

A table module has `rows() -> list[Row]`; `main(rows, name)` measures, prints and writes them, and with `--build` only
compiles what they launch.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

ROUNDS = 5
# Largest relative L2 error against fp64 that lets a time be reported.
PARITY = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 1e-5}
GRAPH = ", graph"
Functions = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Row:
    """One piece of work, ours and the peers' ways to do it.

    `errors` gives relative errors by name and runs before any timing; `floor` is the least time in ms that the card's
    bandwidth and arithmetic allow. `goals` has the wanted ratio of our time to the best peer's: of our fastest way
    ("any"), or of our launches one by one ("launched") and of our graph ("graph"). `prepare` builds the functions to
    time, so that one row's memory is free before the next. Peers in `waiting` wait for the device and are not captured:
    a capture that fails spoils the process for those after it.
    """

    name: str
    dtype: torch.dtype
    floor: float
    goals: dict[str, float]
    errors: Callable[[], dict[str, float]]
    prepare: Callable[[], tuple[Functions, Functions]]
    waiting: frozenset[str] = frozenset()


@dataclass
class Result:
    """A measured row: medians in ms by name."""

    name: str
    errors: dict[str, float] = field(default_factory=dict)
    parity: bool = False
    ours: dict[str, float] = field(default_factory=dict)
    peers: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    floor: float = 0.0
    goals: dict[str, float] = field(default_factory=dict)

    @property
    def measured(self) -> bool:
        return bool(self.parity and self.ours and self.peers)

    def lines(self) -> list[str]:
        """Printed rows, one for each goal, and what could not run."""
        if not self.errors:
            return [f"{self.name:46} FAILED {self.failed}"]
        if not self.parity:
            return [f"{self.name:46} PARITY FAILED {self.errors}"]
        if not self.measured:
            return [f"{self.name:46} NOT MEASURED {self.failed}"]
        lines = [self._line(way, goal) for way, goal in self.goals.items()]
        return lines + [f"    could not run {name}: {error}"[:200] for name, error in self.failed.items()]

    def _line(self, way: str, goal: float) -> str:
        ours = {
            name: time for name, time in self.ours.items() if way == "any" or (way == "graph") == name.endswith(GRAPH)
        }
        if not ours:
            return f"{self.name:46} NOT MEASURED ({way})"
        our_name, our_time = min(ours.items(), key=lambda item: item[1])
        peer_name, peer_time = min(self.peers.items(), key=lambda item: item[1])
        ratio = our_time / peer_time
        verdict = "met" if ratio <= goal else "MISSED"
        return (
            f"{self.name:46} {our_time:8.3f} ({our_name}) | best peer {peer_time:8.3f} ({peer_name})"
            f" | ratio {ratio:.3f} wanted {goal:.3f} {verdict} | {self.floor / our_time:4.0%} of the floor's speed"
        )


def relative_error(value: Tensor, truth: Tensor) -> float:
    """L2 error over L2 norm, in fp64; NaN where value has one."""
    return ((value.double() - truth.double()).norm() / truth.double().norm()).item()


def upstream_of(tensor: Tensor) -> Tensor:
    """An upstream gradient for it. Of a generator of its own: torch's is of no use after a capture that failed."""
    generator = torch.Generator(tensor.device).manual_seed(1)
    return torch.randn(tensor.shape, generator=generator, device=tensor.device).to(tensor.dtype)


def graphed(function: Callable[[], object]) -> Callable[[], object]:
    """The function captured in a CUDA graph: what remains when launching costs nothing."""
    before = torch.cuda.current_stream()
    stream = torch.cuda.Stream()
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    before.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            function()
    finally:
        # torch leaves the capture's stream in force where the capture fails
        torch.cuda.set_stream(before)
    return graph.replay


def interleaved_medians(functions: Functions) -> dict[str, float]:
    """Median of ROUNDS medians in ms, the functions taking turns so that drift of the card hits all alike."""
    from triton.testing import do_bench

    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(ROUNDS):
        for name, function in functions.items():
            times[name].append(do_bench(function, warmup=10, rep=40, return_mode="median"))
    return {name: statistics.median(values) for name, values in times.items()}


def measure(row: Row) -> Result:
    """Parity, then times; nothing is timed where parity fails, and nothing that fails is raised."""
    result = Result(row.name, floor=row.floor, goals=row.goals)
    try:
        result.errors = row.errors()
        result.parity = all(error <= PARITY[row.dtype] for error in result.errors.values())
        if result.parity:
            _time(row, result)
    except Exception as error:  # a row that cannot run must not hide the others
        result.failed["row"] = _said(error)
    return result


def _time(row: Row, result: Result) -> None:
    ours, peers = row.prepare()
    ready: Functions = {}
    for kind, functions in (("ours", ours), ("peers", peers)):
        for name, function in functions.items():
            ways = {name: lambda f: f} | ({} if name in row.waiting else {name + GRAPH: graphed})
            for label, make in ways.items():
                try:
                    made = make(function)
                    made()
                    torch.cuda.synchronize()
                    ready[f"{kind}/{label}"] = made
                except Exception as error:  # nor a way to run it the other ways
                    result.failed[f"{kind}/{label}"] = _said(error)
    for name, time in interleaved_medians(ready).items():
        kind, label = name.split("/", 1)
        getattr(result, kind)[label] = time


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:200]


def build(row: Row) -> None:
    """Run everything once, so that the compilers' caches on disk hold what the row launches."""
    try:
        row.errors()
        for functions in row.prepare():
            for name, function in functions.items():
                try:
                    function()
                    torch.cuda.synchronize()
                except Exception as error:
                    print(f"{row.name}: {name}: {_said(error)}", flush=True)
        print(f"{row.name}: built", flush=True)
    except Exception as error:
        print(f"{row.name}: {_said(error)}", flush=True)


def describe_machine() -> dict[str, str | None]:
    """The card and the versions that a time belongs to."""
    import triton

    return {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def main(rows: Iterable[Row], name: str) -> None:
    """Measure all rows, print them and write OUT/name.json; exits with 1 where a row has no times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_check"), help="folder for the JSON")
    parser.add_argument("--build", action="store_true", help="only compile, into the caches on disk")
    options = parser.parse_args()
    if options.build:
        for row in rows:
            build(row)
            torch.cuda.empty_cache()
        return
    options.out.mkdir(parents=True, exist_ok=True)
    machine = describe_machine()
    print(" | ".join(f"{key} {value}" for key, value in machine.items()), flush=True)
    results = []
    for row in rows:
        results.append(measure(row))
        print("\n".join(results[-1].lines()), flush=True)
        # written after each row: a run that is cut short keeps what it has
        content = {"machine": machine, "rows": [vars(result) for result in results]}
        (options.out / f"{name}.json").write_text(json.dumps(content, indent=2))
        torch.cuda.empty_cache()
    sys.exit(not all(result.measured for result in results))
