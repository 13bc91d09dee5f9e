"""What the GPU tables share: parity first, then interleaved medians, printed rows and JSON.

A table module has `rows() -> list[Row]`; `main(rows, name)` measures, prints and writes them.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

ROUNDS = 5
# Largest relative L2 error against fp64 that lets a time be reported.
PARITY = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 1e-5}


@dataclass(frozen=True)
class Row:
    """One piece of work, ours and the peers' ways to do it.

    `errors` gives relative errors by name and runs before any timing; `floor` is the least time in ms that the card's
    bandwidth and arithmetic allow; `goal` is the wanted ratio of our time to the best peer's. `prepare` builds the
    functions to time, so that one row's memory is free before the next.
    """

    name: str
    dtype: torch.dtype
    floor: float
    goal: float
    errors: Callable[[], dict[str, float]]
    prepare: Callable[[], tuple[dict[str, Callable[[], object]], dict[str, Callable[[], object]]]]


@dataclass
class Result:
    """A measured row: medians in ms by name."""

    name: str
    errors: dict[str, float]
    parity: bool
    ours: dict[str, float] = field(default_factory=dict)
    peers: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    floor: float = 0.0
    goal: float = 0.0

    def line(self) -> str:
        """One printed row."""
        if not self.parity:
            return f"{self.name:46} PARITY FAILED {self.errors}"
        if not self.ours or not self.peers:
            return f"{self.name:46} NOT MEASURED {self.failed}"
        our_name, our_time = min(self.ours.items(), key=lambda item: item[1])
        peer_name, peer_time = min(self.peers.items(), key=lambda item: item[1])
        ratio = our_time / peer_time
        verdict = "met" if ratio <= self.goal else "MISSED"
        return (
            f"{self.name:46} {our_time:8.3f} ({our_name}) | best peer {peer_time:8.3f} ({peer_name})"
            f" | ratio {ratio:.3f} wanted {self.goal:.3f} {verdict} | {self.floor / our_time:4.0%} of the floor's speed"
        )


def relative_error(value: Tensor, truth: Tensor) -> float:
    """L2 error over L2 norm, in fp64; NaN where value has one."""
    return ((value.double() - truth.double()).norm() / truth.double().norm()).item()


def graphed(function: Callable[[], object]) -> Callable[[], object]:
    """The function captured in a CUDA graph: what remains when launching costs nothing."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def interleaved_medians(functions: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median of ROUNDS medians in ms, the functions taking turns so that drift of the card hits all alike."""
    from triton.testing import do_bench

    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(ROUNDS):
        for name, function in functions.items():
            times[name].append(do_bench(function, warmup=10, rep=40, return_mode="median"))
    return {name: statistics.median(values) for name, values in times.items()}


def measure(row: Row) -> Result:
    """Parity, then times; nothing is timed where parity fails."""
    errors = row.errors()
    result = Result(row.name, errors, all(error <= PARITY[row.dtype] for error in errors.values()))
    result.floor, result.goal = row.floor, row.goal
    if not result.parity:
        return result
    ours, peers = row.prepare()
    ready: dict[str, Callable[[], object]] = {}
    for kind, functions in (("ours", ours), ("peers", peers)):
        for name, function in functions.items():
            for label, make in ((name, lambda f: f), (f"{name}, graph", graphed)):
                try:
                    ready[f"{kind}/{label}"] = made = make(function)
                    made()
                    torch.cuda.synchronize()
                except Exception as error:  # a peer that cannot run must not hide the others
                    ready.pop(f"{kind}/{label}", None)
                    result.failed[f"{kind}/{label}"] = f"{type(error).__name__}: {error}"[:200]
    for name, time in interleaved_medians(ready).items():
        kind, label = name.split("/", 1)
        getattr(result, kind)[label] = time
    return result


def main(rows: Iterable[Row], name: str) -> None:
    """Measure all rows, print one line each and write OUT/name.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_check"), help="folder for the JSON")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    import triton

    machine = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
    print(" | ".join(f"{key} {value}" for key, value in machine.items()))
    results = []
    for row in rows:
        results.append(measure(row))
        print(results[-1].line(), flush=True)
        torch.cuda.empty_cache()
        # written after each row: a run that is cut short keeps what it has
        content = {"machine": machine, "rows": [vars(result) for result in results]}
        (out / f"{name}.json").write_text(json.dumps(content, indent=2))
