"""benchmarks/gpu_check.sh and what its tables share, without a GPU: what fails must not hide what does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

# Stands for Python on a machine with a GPU. Tests leave a line each while they run; the last one hangs if told to.
STUB = """#!/usr/bin/env bash
case "$*" in
  "-c "*xdist*) exit 1 ;;
  "-c "*) exit "${NO_CARD:-0}" ;;
  *" -k not "*)
    echo "tests/test_gpu.py::test_one PASSED [ 33%]"
    echo "tests/test_gpu.py::test_two FAILED [ 66%]"
    if [ -n "${HANG:-}" ]; then exec sleep 60; fi
    exit "${BAD_TESTS:-0}" ;;
  "-m pytest "*) echo "tests/test_gpu.py::test_large PASSED [100%]" ;;
  *--build*) exit 3 ;;
  *loss.py*) echo "row of the loss"; exit "${BAD_LOSS:-0}" ;;
  *) echo "row of another table" ;;
esac
"""


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        ({}, 0, "tests: exit 0"),
        ({"BAD_TESTS": "1"}, 1, "tests/test_gpu.py::test_two FAILED"),
        ({"BAD_LOSS": "1"}, 1, "loss: exit 1"),
        ({"HANG": "1", "LIMIT": "2"}, 1, "tests: exit 124"),
    ],
)
def test_the_script_ends_with_a_summary(tmp_path: Path, change: dict[str, str], status: int, said: str) -> None:
    stub = tmp_path / "python"
    stub.write_text(STUB)
    stub.chmod(0o755)
    environment = os.environ | {"PYTHON": str(stub)} | change
    command = ["bash", str(BENCHMARKS / "gpu_check.sh"), str(tmp_path / "out")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = result.stdout.splitlines()
    assert result.returncode == status, result.stdout + result.stderr
    assert any(line.startswith(said) for line in lines), result.stdout
    assert "==== gpu_check summary ====" in lines and lines[-1].startswith("total ") and len(lines) <= 100
    assert any(line.split() == ["1", "FAILED", "1", "PASSED"] for line in lines), "tests that ended are counted"
    assert "row of another table" in lines or "HANG" in change


def test_the_script_says_where_there_is_no_card(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", str(BENCHMARKS / "gpu_check.sh"), str(tmp_path / "out")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 2 and "no CUDA device" in result.stderr


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch):
    """The tables' module, with made-up times: a graph takes half as long."""
    monkeypatch.syspath_prepend(str(BENCHMARKS / "gpu"))
    import measuring

    captured = []
    monkeypatch.setattr(measuring, "graphed", lambda function: captured.append(function) or function)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        measuring,
        "interleaved_medians",
        lambda functions: {name: 0.5 if name.endswith(measuring.GRAPH) else 1.0 for name in functions},
    )
    monkeypatch.setattr(measuring, "captured", captured, raising=False)
    return measuring


def row(measuring, **change):
    def fails() -> None:
        raise RuntimeError("this peer cannot run")

    def waits() -> None:
        pass

    fields = {
        "name": "work",
        "dtype": torch.bfloat16,
        "floor": 0.25,
        "goals": {"launched": 2.0, "graph": 0.9},
        "errors": lambda: {"out": 1e-3},
        "prepare": lambda: ({"ours": lambda: None}, {"fails": fails, "loop": waits}),
        "waiting": frozenset({"loop"}),
    }
    return measuring.Row(**fields | change)


def test_each_goal_has_its_line_and_a_peer_that_fails_is_named(measuring) -> None:
    result = measuring.measure(row(measuring))
    launched, graph, *others = result.lines()
    assert "ours)" in launched and launched.count("met") == 1
    assert "0.500 (ours, graph)" in graph and "wanted 0.900 met" in graph
    assert [line.split(":")[0].strip() for line in others] == [
        "could not run peers/fails",
        "could not run peers/fails, graph",
    ]
    assert not any(function.__name__ == "waits" for function in measuring.captured), "what waits must not be captured"


@pytest.mark.parametrize("stage", ["errors", "prepare"])
def test_a_row_that_fails_is_a_line(measuring, stage: str) -> None:
    def fails() -> None:
        raise RuntimeError("out of\nmemory")

    result = measuring.measure(row(measuring, **{stage: fails}))
    (line,) = result.lines()
    assert "RuntimeError: out of memory" in line and not result.measured
    measuring.build(row(measuring, **{stage: fails}))


def test_nothing_is_timed_without_parity(measuring) -> None:
    result = measuring.measure(row(measuring, errors=lambda: {"out": float("nan")}))
    assert "PARITY FAILED" in result.lines()[0] and not result.ours


def test_a_sweep_changes_what_is_there_and_puts_it_back(measuring, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    import sweep

    from goal_kernels.dilated_conv import configurations

    before = configurations.NORM_PROGRAMS
    names = set()
    for each in sweep.sweeps():
        assert each.variants[0].name == sweep.PINNED and not each.variants[0].values
        for variant in each.variants:
            with variant.applied():  # fails where an attribute has another name by now
                names.add(variant.name)
    assert "528 programs" in names and before == configurations.NORM_PROGRAMS
    monkeypatch.setattr(sweep, "graphed", lambda function: function)
    monkeypatch.setattr(sweep, "interleaved_medians", lambda functions: dict.fromkeys(functions, 1.0))
    seen = []
    work = row(
        measuring,
        errors=lambda: seen.append(configurations.NORM_PROGRAMS) or {"out": 0.5 if len(seen) == 3 else 1e-3},
        prepare=lambda: ({"ours": lambda: None}, {}),
    )
    variants = [sweep.Variant(sweep.PINNED)]
    variants += [sweep.Variant(str(n), {"dilated_conv.configurations:NORM_PROGRAMS": n}) for n in (7, 8)]
    pinned, other, wrong = sweep.lines(sweep.Sweep(work, ()), sweep.run(sweep.Sweep(work, tuple(variants))))
    assert seen == [before, 7, 8]
    assert "1.000 of pinned" in pinned and "1.000 of pinned" in other and "FAILED ValueError: parity" in wrong
