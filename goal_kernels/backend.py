"""Which implementation of an op runs, and why.

Every op has an eager implementation (plain torch, the truth for tests) and may have a Triton one. The choice is made
per tensor, so that CPU and CUDA tensors can be used side by side:

* ``auto`` (the default): Triton for CUDA tensors where Triton imports, eager otherwise.
* ``eager``: plain torch everywhere.
* ``triton``: Triton wherever it can run. With ``TRITON_INTERPRET=1`` set before Triton is imported, that includes CPU
  tensors: the real kernels run in Triton's interpreter, slowly, for tests.

A path that was asked for and cannot run is never an error, nor is a tensor that one op's kernels do not take: eager
runs instead and the logger ``goal_kernels`` says so once, at level WARNING; the ordinary choice is said once at level
INFO.
"""

from __future__ import annotations

import logging
import os
from typing import Literal, get_args

import torch

Backend = Literal["auto", "eager", "triton"]
ENVIRONMENT_VARIABLE = "GOAL_KERNELS_BACKEND"

logger = logging.getLogger("goal_kernels")

_requested: Backend = "auto"
# Filled on first use and emptied by set_backend, so that an op's dispatch is one dictionary look-up.
_resolved: dict[str, str] = {}
_announced: set[str] = set()


def set_backend(backend: Backend) -> None:
    """Choose the implementation of every op from here on.

    Args:
        backend: `"auto"`, `"eager"` or `"triton"` (see the module's docstring). `"auto"` gives way to the environment
            variable `GOAL_KERNELS_BACKEND`, which takes the same values and is read on the next use of an op.

    Raises:
        ValueError: `backend` is none of the three.
    """
    global _requested
    if backend not in get_args(Backend):
        raise ValueError(f"backend is {backend!r}; expected one of {', '.join(map(repr, get_args(Backend)))}")
    _requested = backend
    _resolved.clear()


def backend_for(tensor: torch.Tensor) -> str:
    """Name of the implementation that ops run for `tensor`: `"eager"` or `"triton"`.

    Raises:
        ValueError: the environment variable `GOAL_KERNELS_BACKEND` holds an unknown name.
    """
    device = tensor.device.type
    backend = _resolved.get(device)
    if backend is None:
        backend, reason, fallback = _resolve(device)
        _resolved[device] = backend
        _announce(device, backend, reason, fallback)
    return backend


def explain_backend() -> str:
    """One line per kind of tensor (CPU, CUDA): which implementation runs and why.

    Raises:
        ValueError: the environment variable `GOAL_KERNELS_BACKEND` holds an unknown name.
    """
    lines = []
    for device in ("cpu", "cuda"):
        backend, reason, _ = _resolve(device)
        lines.append(f"{device} tensors: {backend} ({reason})")
    if not torch.cuda.is_available():
        lines.append("torch finds no CUDA device here")
    return "\n".join(lines)


def _request() -> tuple[str, str]:
    """The backend in force and the words that say who asked for it."""
    if _requested != "auto":
        return _requested, f'set_backend("{_requested}")'
    value = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if not value:
        return "auto", "automatic choice"
    if value not in get_args(Backend):
        names = ", ".join(map(repr, get_args(Backend)))
        raise ValueError(f"environment variable {ENVIRONMENT_VARIABLE} is {value!r}; expected one of {names}, or unset")
    return value, f"{ENVIRONMENT_VARIABLE}={value}"


def _resolve(device: str) -> tuple[str, str, bool]:
    """Backend for tensors of a device type, the reason, and whether a faster or requested path had to be given up."""
    request, origin = _request()
    if request == "eager":
        return "eager", origin, False
    if device != "cuda" and request == "auto":
        return "eager", f"{origin}: Triton kernels run on CUDA tensors only", False
    problem = _triton_problem()
    if problem:
        return "eager", f"{origin}, but {problem}", True
    if device == "cuda":
        return "triton", origin, False
    if device == "cpu" and _interpreting():
        return "triton", f"{origin}: in Triton's interpreter", False
    return "eager", f"{origin}, but Triton kernels run on CUDA tensors only (or on CPU under TRITON_INTERPRET=1)", True


def _triton_problem() -> str:
    """Why Triton cannot be used, or an empty string."""
    try:
        import triton  # noqa: F401
    except Exception as error:  # a broken driver or a mismatched build raises more than ImportError
        return f"Triton does not import: {error}"
    return ""


def _interpreting() -> bool:
    """Whether Triton runs kernels in its interpreter: the values Triton itself reads as true."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def fall_back(op: str, limits: str) -> None:
    """Say once that an op runs in eager for tensors that its kernels do not take.

    Args:
        op: name of the op.
        limits: what the kernels take.
    """
    _say(f"{op}: eager runs for a tensor that its Triton kernels do not take ({limits})", logging.WARNING)


def _announce(device: str, backend: str, reason: str, fallback: bool) -> None:
    _say(f"{device} tensors: {backend} ({reason})", logging.WARNING if fallback else logging.INFO)


def _say(line: str, level: int) -> None:
    # Logging would break a graph that torch.compile is tracing; the line then comes with the first eager call.
    if not torch.compiler.is_compiling() and line not in _announced:
        _announced.add(line)
        logger.log(level, "%s", line)
