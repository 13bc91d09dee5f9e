"""Argument checks that every op shares: one wording for one kind of mistake.

Each function returns nothing or the checked value and raises `TypeError` (wrong kind of thing) or `ValueError` (wrong
value or shape) whose message names the argument, what came and what was expected. All of them can be traced by
`torch.compile(fullgraph=True)`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

FLOATING = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTEGER = (torch.int64, torch.int32)
DEBUG_VARIABLE = "GOAL_KERNELS_DEBUG"


def check_tensor(argument: str, value: object, *, dtypes: Sequence[torch.dtype] = FLOATING) -> None:
    """`value` is a tensor of one of `dtypes`."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{argument} is a {type(value).__name__}; expected a torch.Tensor")
    if value.dtype not in dtypes:
        raise TypeError(f"{argument} has dtype {value.dtype}; expected one of {', '.join(map(str, dtypes))}")


def check_shape(argument: str, value: Tensor, expected: Sequence[int | None], axes: str) -> None:
    """`value` has the shape `expected`, where None stands for any length.

    `axes` names the axes for the message, e.g. `"(B, L, D)"`.
    """
    matches = value.dim() == len(expected)
    if matches:
        for length, wanted in zip(value.shape, expected, strict=True):
            if wanted is not None and length != wanted:
                matches = False
    if not matches:
        wanted_text = ", ".join("any" if length is None else str(length) for length in expected)
        raise ValueError(f"{argument} has shape {tuple(value.shape)}; expected {axes} = ({wanted_text})")


def check_same_device(reference_argument: str, reference: Tensor, **tensors: Tensor | None) -> None:
    """Every given tensor lives on the device of `reference`; None is skipped."""
    for argument, value in tensors.items():
        if value is not None and value.device != reference.device:
            raise ValueError(
                f"{argument} is on {value.device} but {reference_argument} is on {reference.device}; "
                f"move it there with {argument}.to({reference_argument}.device)"
            )


def check_same_dtype(reference_argument: str, reference: Tensor, **tensors: Tensor | None) -> None:
    """Every given tensor has the dtype of `reference`; None is skipped."""
    for argument, value in tensors.items():
        if value is not None and value.dtype != reference.dtype:
            raise TypeError(
                f"{argument} has dtype {value.dtype} but {reference_argument} has {reference.dtype}; "
                f"convert one of them, or run both under torch.autocast"
            )


def check_integer(argument: str, value: object, *, minimum: int, maximum: int | None = None) -> None:
    """`value` is an int (a symbolic one included, a bool not) within the bounds."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise TypeError(f"{argument} is {value!r}, a {type(value).__name__}; expected an int")
    if value < minimum or (maximum is not None and value > maximum):
        bounds = f"at least {minimum}" if maximum is None else f"between {minimum} and {maximum}"
        raise ValueError(f"{argument} is {value}; expected {bounds}")


def check_number(argument: str, value: object, *, minimum: float, exclusive: bool = False) -> None:
    """`value` is a finite int or float, at least `minimum` (above it if `exclusive`)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{argument} is {value!r}, a {type(value).__name__}; expected a number")
    too_low = value <= minimum if exclusive else value < minimum
    if value != value or value == float("inf") or too_low:
        raise ValueError(f"{argument} is {value}; expected a finite number {'above' if exclusive else '>='} {minimum}")


def check_choice(argument: str, value: object, choices: Sequence[str]) -> None:
    """`value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{argument} is {value!r}; expected one of {', '.join(map(repr, choices))}")


def debugging() -> bool:
    """Whether checks of values run that cost a synchronisation on a GPU: `GOAL_KERNELS_DEBUG=1` in the environment."""
    return not torch.compiler.is_compiling() and os.environ.get(DEBUG_VARIABLE, "") == "1"
