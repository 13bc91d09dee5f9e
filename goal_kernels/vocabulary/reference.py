"""The vocabulary and the tokenizer in plain Python: slow, readable, and what the native code is tested against.

Amounts that are multiples of ``min_unit``, or of a tenth to a ten-thousandth of it, are counted in units of that grid,
so that residuals are whole numbers and exact; all other amounts stay floats.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

MAX_DECIMALS = 4
MAX_EXACT = 2**53
FORGIVEN = 2.0**-50


def as_fraction(unit: float) -> Fraction:
    """The short fraction that ``unit`` was written as, so that 0.01 is 1/100 and not the double next to it."""
    short = Fraction(unit).limit_denominator(10**6)
    return short if float(short) == unit else Fraction(unit)


def count_units(amount: float, unit: Fraction) -> int | None:
    """How many units an amount is, or None where it is no multiple.

    Four rounding errors are forgiven, which is what adding up prices leaves, or making coins of them (20.49 * 100).
    Where multiples are exact doubles and so many that a rounding error is a good part of a unit, none is.
    """
    count = round(Fraction(amount) / unit)
    exact = count * unit == Fraction(amount)
    if exact or (is_dyadic(unit) and count > 2**46):
        return count if exact else None
    return count if abs(float(count * unit) - amount) <= amount * FORGIVEN else None


def is_dyadic(unit: Fraction) -> bool:
    """Whether multiples of the unit are binary fractions, and so exact doubles."""
    return unit.denominator & (unit.denominator - 1) == 0


def find_unit(amounts: Sequence[float], min_unit: float) -> Fraction | None:
    """The coarsest of ``min_unit`` and its tenth ... ten-thousandth that all amounts are multiples of."""
    for decimals in range(MAX_DECIMALS + 1):
        unit = as_fraction(min_unit) / 10**decimals
        limit = MAX_EXACT if decimals == 0 or is_dyadic(unit) else 2**46
        counts = [count_units(amount, unit) for amount in amounts]
        if all(count is not None and count <= limit for count in counts):
            return unit
    return None


def quantile(ordered: Sequence[float], q: float) -> float:
    """The q-quantile of ascending values as one of them (inverted distribution function, no interpolation)."""
    return ordered[max(0, math.ceil(len(ordered) * q - 1))]


def build_vocabulary(
    values: Iterable[float],
    *,
    q_start: float = 0.9999,
    q_end: float = 0.9,
    decay: float = 0.99,
    relative_error: float = 1e-3,
    min_unit: float = 1.0,
    max_tokens: int = 512,
) -> list[float]:
    """Algorithm 1 of the paper; see `goal_kernels.build_vocabulary` for arguments and departures."""
    amounts = [float(value) for value in values if value > 0]
    if not amounts:
        raise ValueError("values holds no amount above 0")
    unit = find_unit(amounts, min_unit)
    if unit is None:
        return _choose(amounts, min_unit, q_start, q_end, decay, relative_error, max_tokens)
    counts = [count_units(amount, unit) for amount in amounts]
    smallest = round(as_fraction(min_unit) / unit)
    tokens = _choose(counts, smallest, q_start, q_end, decay, relative_error, max_tokens)
    return [float(token * unit) for token in tokens[:-1]] + [min_unit]


def _choose(
    amounts: Sequence,
    min_unit: float,
    q_start: float,
    q_end: float,
    decay: float,
    relative_error: float,
    max_tokens: int,
) -> list:
    residuals = list(amounts)
    tokens = set()
    q = q_start
    error = math.inf
    while error > relative_error and len(tokens) + 1 < max_tokens:
        positive = sorted(residual for residual in residuals if residual > 0)
        token = quantile(positive, q)
        if token <= min_unit:
            break
        tokens.add(token)
        residuals = [residual - token if residual >= token else residual for residual in residuals]
        error = max(residual / amount for residual, amount in zip(residuals, amounts, strict=True))
        if error == 0:
            break
        q = max(q * decay, q_end)
    return [*sorted(tokens, reverse=True), min_unit]


def encode(values: Iterable[float], vocabulary: Sequence[float], *, max_length: int) -> list[list[int]]:
    """Token sequences: again and again the largest token that is at most what is left (paper, greedy decomposition)."""
    unit = find_unit(vocabulary, vocabulary[-1])
    steps: list = list(vocabulary) if unit is None else [count_units(value, unit) for value in vocabulary]
    sequences = []
    for value in values:
        residual = value
        if unit is not None:
            count = count_units(value, unit)
            residual = math.floor(Fraction(value) / unit) if count is None else count
        sequence = []
        for token, step in enumerate(steps):
            while step <= residual:
                if len(sequence) == max_length:
                    raise ValueError(f"{value} needs more than max_length = {max_length} tokens")
                sequence.append(token)
                residual -= step
        sequences.append(sequence)
    return sequences


def decode(sequences: Iterable[Sequence[int]], vocabulary: Sequence[float]) -> list[float]:
    """The amount that each sequence adds up to."""
    unit = find_unit(vocabulary, vocabulary[-1])
    steps: list = list(vocabulary) if unit is None else [count_units(value, unit) for value in vocabulary]
    amounts = []
    for sequence in sequences:
        total = 0.0 if unit is None else 0
        for token in sequence:  # not sum(), which from Python 3.12 on corrects rounding
            total += steps[token]
        amounts.append(total if unit is None else float(total * unit))
    return amounts
