"""Turns what callers pass into the arrays the native code takes, or says what is wrong with it."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

THREADS_VARIABLE = "GOAL_KERNELS_THREADS"
AMOUNT_TYPES = (np.dtype(np.float64), np.dtype(np.float32), np.dtype(np.int64))
TOKEN_TYPES = (np.dtype(np.int32), np.dtype(np.int64))


def amounts_array(values: Any) -> np.ndarray:
    """``values`` as a C-contiguous ``(N,)`` array of float64, float32 or int64; what has another type is refused."""
    array = np.asarray(values)
    if array.size == 0 and isinstance(values, (list, tuple)):
        array = array.astype(np.float64)
    if array.dtype not in AMOUNT_TYPES:
        raise ValueError(
            f"values has dtype {array.dtype}, expected float64, float32 or int64: convert it with .astype(...) "
            "if that loses nothing"
        )
    if array.ndim != 1:
        raise ValueError(f"values has shape {array.shape}, expected one dimension (N,): flatten it with .reshape(-1)")
    return np.ascontiguousarray(array)


def vocabulary_array(vocabulary: Any) -> np.ndarray:
    """``vocabulary`` as a C-contiguous ``(V,)`` float64 array; the native code checks its values."""
    array = (
        np.asarray(vocabulary, dtype=np.float64) if isinstance(vocabulary, (list, tuple)) else np.asarray(vocabulary)
    )
    if array.dtype != np.float64:
        raise ValueError(
            f"vocabulary has dtype {array.dtype}, expected float64: convert it with .astype(numpy.float64)"
        )
    if array.ndim != 1:
        raise ValueError(f"vocabulary has shape {array.shape}, expected one dimension (V,)")
    return np.ascontiguousarray(array)


def tokens_array(tokens: Any) -> np.ndarray:
    """``tokens`` as a C-contiguous ``(N, T)`` array of int32 or int64."""
    array = np.asarray(tokens)
    if array.dtype not in TOKEN_TYPES:
        raise ValueError(
            f"tokens has dtype {array.dtype}, expected int32 or int64: convert it with .astype(numpy.int32)"
        )
    if array.ndim != 2:
        raise ValueError(f"tokens has shape {array.shape}, expected two dimensions (N, T): one row an amount")
    return np.ascontiguousarray(array)


def positive_integer(name: str, value: Any) -> int:
    """``value`` as an int of at least 1."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} is {value!r}, expected an integer")
    if value < 1:
        raise ValueError(f"{name} is {value}, expected at least 1")
    return int(value)


def thread_count(threads: int | None) -> int:
    """Threads to use: the argument, else the environment variable GOAL_KERNELS_THREADS, else the usable cores."""
    if threads is not None:
        return positive_integer("threads", threads)
    text = os.environ.get(THREADS_VARIABLE)
    if text is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ValueError(f"{THREADS_VARIABLE} is {text!r}, expected a whole number of at least 1: correct or unset it")
    return int(text)
