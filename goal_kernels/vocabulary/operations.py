"""`build_vocabulary`, `encode` and `decode`."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np

from goal_kernels.vocabulary.checks import (
    amounts_array,
    positive_integer,
    thread_count,
    tokens_array,
    vocabulary_array,
)
from goal_kernels.vocabulary.native import native


class _Pair(NamedTuple):
    tokens: np.ndarray
    lengths: np.ndarray


class Encoding(_Pair):
    """The pair ``(tokens, lengths)`` of `encode`; `truncated` counts the amounts cut at ``max_length``."""

    truncated: int

    def __new__(cls, tokens: np.ndarray, lengths: np.ndarray, truncated: int = 0) -> Encoding:
        encoding = super().__new__(cls, tokens, lengths)
        encoding.truncated = truncated
        return encoding


def build_vocabulary(
    values: Any,
    *,
    q_start: float = 0.9999,
    q_end: float = 0.9,
    decay: float = 0.99,
    relative_error: float = 1e-3,
    min_unit: float = 1.0,
    max_tokens: int = 512,
    threads: int | None = None,
) -> np.ndarray:
    """Incentive vocabulary of Algorithm 1: quantiles of what the tokens so far leave of each amount.

    Departures from the algorithm as printed: zeros take no part, a percentile is an observed value (inverted CDF),
    tokens are unique, ``min_unit`` is always the last one, and the size has a cap. Amounts on a grid of ``min_unit``,
    or of a tenth to a ten-thousandth of it, are computed with as whole numbers, so that no rounding enters.

    Args:
        values: `(N,)` float64, float32 or int64 amounts, at least one above 0.
        q_start: percentile of the first token, in (0, 1].
        q_end: the percentile never falls below this.
        decay: factor on the percentile from one round to the next (delta).
        relative_error: stop once no residual exceeds this share of its amount (epsilon_1).
        min_unit: smallest token (epsilon_2): multiples of it are exact, anything else is within it.
        max_tokens: cap on the size, ``min_unit`` included.
        threads: threads to use; default: GOAL_KERNELS_THREADS, else all usable cores. The result never depends on it.

    Returns:
        `(V,)` float64, strictly descending, ``min_unit`` last.

    Raises:
        ValueError: no amount above 0; NaN, infinite or negative amounts; another dtype; an option out of range.

    Example:
        >>> import numpy as np
        >>> build_vocabulary(np.array([0, 1, 2, 5, 5, 7])).tolist()
        [7.0, 5.0, 2.0, 1.0]
    """
    return native().build_vocabulary(
        amounts_array(values),
        q_start=float(q_start),
        q_end=float(q_end),
        decay=float(decay),
        relative_error=float(relative_error),
        min_unit=float(min_unit),
        max_tokens=positive_integer("max_tokens", max_tokens),
        threads=thread_count(threads),
    )


def encode(
    values: Any,
    vocabulary: Any,
    *,
    max_length: int,
    on_overflow: Literal["error", "truncate"] = "error",
    threads: int | None = None,
) -> Encoding:
    """Greedy decomposition: again and again the largest token that is at most what is left.

    Args:
        values: `(N,)` float64, float32 or int64 amounts. 0 is the empty sequence.
        vocabulary: `(V,)` float64, positive, strictly descending.
        max_length: width of the result.
        on_overflow: "error" refuses an amount that needs more tokens; "truncate" cuts it and counts it.
        threads: as in `build_vocabulary`.

    Returns:
        `tokens` `(N, max_length)` int32 that never decrease within a row (values never increase), -1 after the last,
        and `lengths` `(N,)` int32. `truncated` on the result counts the amounts that were cut.

    Raises:
        ValueError: an amount that is NaN, infinite or negative, or that needs more than ``max_length`` tokens; a
            vocabulary that is empty, not positive or not strictly descending; another dtype.

    Example:
        >>> import numpy as np
        >>> tokens, lengths = encode(np.array([0.0, 9.0]), np.array([5.0, 2.0, 1.0]), max_length=4)
        >>> tokens.tolist(), lengths.tolist()
        ([[-1, -1, -1, -1], [0, 1, 1, -1]], [0, 3])
    """
    if on_overflow not in ("error", "truncate"):
        raise ValueError(f'on_overflow is {on_overflow!r}, expected "error" or "truncate"')
    tokens, lengths, truncated = native().encode(
        amounts_array(values),
        vocabulary_array(vocabulary),
        max_length=positive_integer("max_length", max_length),
        truncate=on_overflow == "truncate",
        threads=thread_count(threads),
    )
    return Encoding(tokens, lengths, truncated)


def decode(tokens: Any, vocabulary: Any, *, threads: int | None = None) -> np.ndarray:
    """Sum of the tokens of each row; -1 adds nothing.

    Args:
        tokens: `(N, T)` int32 or int64 ids, -1 for none.
        vocabulary: `(V,)` float64, positive, strictly descending.
        threads: as in `build_vocabulary`.

    Returns:
        `(N,)` float64 amounts.

    Raises:
        ValueError: an id below -1 or not below V; a bad vocabulary; another dtype.

    Example:
        >>> import numpy as np
        >>> decode(np.array([[0, 1, 1, -1]], dtype=np.int32), np.array([5.0, 2.0, 1.0])).tolist()
        [9.0]
    """
    return native().decode(tokens_array(tokens), vocabulary_array(vocabulary), threads=thread_count(threads))
