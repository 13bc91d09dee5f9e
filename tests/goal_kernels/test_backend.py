"""Choosing the implementation: precedence, fallbacks, and what is said about it."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from goal_kernels import backend
from goal_kernels.backend import ENVIRONMENT_VARIABLE, backend_for, explain_backend, set_backend


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No request in force, nothing said yet; the same afterwards."""
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    backend._announced.clear()
    set_backend("auto")
    yield
    monkeypatch.undo()
    set_backend("auto")


class OnCuda:
    """Stands for a CUDA tensor where there is no GPU: backend_for looks at the device only."""

    device = torch.device("cuda", 0)


CPU = torch.zeros(1)
CUDA = OnCuda()


def test_auto_is_triton_for_cuda_and_eager_for_cpu() -> None:
    assert backend_for(CPU) == "eager"
    assert backend_for(CUDA) == "triton"


@pytest.mark.parametrize("request_by", ["call", "environment"])
def test_eager_on_request(request_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if request_by == "call":
        set_backend("eager")
    else:
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, "eager")
    assert backend_for(CUDA) == "eager"


def test_call_overrides_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "eager")
    set_backend("triton")
    assert backend_for(CUDA) == "triton"
    set_backend("auto")
    assert backend_for(CUDA) == "eager"


def test_unknown_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="backend is 'cuda'; expected one of 'auto', 'eager', 'triton'"):
        set_backend("cuda")  # type: ignore[arg-type]
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "fast")
    set_backend("auto")
    with pytest.raises(ValueError, match="GOAL_KERNELS_BACKEND is 'fast'"):
        backend_for(CPU)


def test_missing_triton_falls_back_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with caplog.at_level(logging.INFO, logger="goal_kernels"):
        assert backend_for(CUDA) == "eager"
        assert backend_for(CUDA) == "eager"
        set_backend("auto")
        assert backend_for(CUDA) == "eager"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "Triton does not import" in caplog.text
    assert "Triton does not import" in explain_backend()


def test_triton_on_cpu_tensors_falls_back_outside_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    set_backend("triton")
    assert backend_for(CPU) == "eager"
    assert caplog.records[0].levelname == "WARNING"
    assert "TRITON_INTERPRET=1" in caplog.text


def test_triton_on_cpu_tensors_under_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backend_for(CPU) == "eager", "auto never picks the interpreter"
    set_backend("triton")
    assert backend_for(CPU) == "triton"


def test_explanation_names_both_devices_and_who_asked() -> None:
    set_backend("eager")
    lines = explain_backend().splitlines()
    assert lines[:2] == ['cpu tensors: eager (set_backend("eager"))', 'cuda tensors: eager (set_backend("eager"))']


def test_choice_is_traceable(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(x: torch.Tensor) -> torch.Tensor:
        return x + (1 if backend_for(x) == "eager" else 2)

    compiled = torch.compile(choose, fullgraph=True, backend="eager")
    assert compiled(CPU).item() == 1
    # a later choice is seen by a graph that is compiled already
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    set_backend("triton")
    assert compiled(CPU).item() == 2


def test_import_touches_neither_triton_nor_cuda() -> None:
    code = (
        "import sys, torch\n"
        "before = 'triton' in sys.modules\n"
        "import goal_kernels, goal_kernels.backend, goal_kernels.dilated_conv\n"
        "assert before or 'triton' not in sys.modules\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_package_works_without_the_extension() -> None:
    """Only the vocabulary needs it, and says so."""
    code = (
        "import sys\n"
        "sys.modules['goal_kernels._native'] = None\n"
        "import numpy, torch, goal_kernels\n"
        "reward = torch.ones(1, 1, 2)\n"
        "assert not goal_kernels.group_advantage(reward, reward, torch.zeros(1)).any()\n"
        "for use in (\n"
        "    goal_kernels.VocabularyAccumulator,\n"
        "    lambda: goal_kernels.build_vocabulary(numpy.ones(1)),\n"
        "    lambda: goal_kernels.encode(numpy.ones(1), numpy.ones(1), max_length=1),\n"
        "    lambda: goal_kernels.decode(numpy.zeros((1, 1), int), numpy.ones(1)),\n"
        "):\n"
        "    try:\n"
        "        use()\n"
        "    except ImportError as error:\n"
        "        assert 'C++ extension' in str(error) and 'build_ext' in str(error), error\n"
        "    else:\n"
        "        raise AssertionError('no error')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
