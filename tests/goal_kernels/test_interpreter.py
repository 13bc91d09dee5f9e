"""Runs `interpreter/`, the tests of the real kernels on CPU, in a process where Triton interprets."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreter"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("module", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_kernels_in_the_interpreter(module: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    # -p no:cacheprovider: this run must not overwrite the last-failed list of the run it is part of
    command = [sys.executable, "-m", "pytest", "-q", "--durations=5", "-p", "no:cacheprovider", str(FOLDER / module)]
    root = Path(__file__).parents[2]
    result = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    print(result.stdout)
