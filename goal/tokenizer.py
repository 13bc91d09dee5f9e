"""Incentive amounts as short token sequences (paper, Section "Incentive Vocabulary Construction", Algorithm 1).

Ids: PAD 0, SOS 1, EOS 2, then the values of the vocabulary from large to small. Amount 0 is EOS at once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from goal.errors import ConfigurationError, LogError
from goal.files import write_atomically
from goal.log.amounts import parquet_amounts
from goal.vocabulary import FitStatistics, in_chunks, measure
from goal_kernels.vocabulary import VocabularyAccumulator, build_vocabulary, decode, encode

PAD, SOS, EOS = 0, 1, 2
SPECIAL_TOKENS = 3
FILE_NAME = "vocabulary.json"
FORMAT = 1


class IncentiveTokenizer:
    """A vocabulary of incentive values with its special tokens.

    Args:
        values: descending positive values; the last one is the smallest amount that can be told from 0.
        max_length: most value tokens in a sequence, SOS and EOS not counted.
        statistics: what `fit` measured, kept with the vocabulary.

    Example:
        >>> tokenizer = IncentiveTokenizer([5.0, 2.0, 1.0], max_length=4)
        >>> tokenizer.encode([0.0, 8.0]).tolist()
        [[1, 2, 0, 0, 0], [1, 3, 4, 5, 2]]
        >>> tokenizer.decode(tokenizer.encode([0.0, 8.0])).tolist()
        [0.0, 8.0]
    """

    def __init__(
        self, values: Sequence[float] | np.ndarray, *, max_length: int = 16, statistics: FitStatistics | None = None
    ) -> None:
        try:
            self._values = np.array(values, dtype=np.float64)
            encode(np.zeros(0), self._values, max_length=max_length)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(str(error)) from error
        self._values.setflags(write=False)
        self._token_values = np.concatenate([np.zeros(SPECIAL_TOKENS), self._values])
        self._token_values.setflags(write=False)
        self._max_length = max_length
        self.statistics = statistics

    @classmethod
    def fit(
        cls,
        amounts: Any,
        *,
        q_start: float = 0.9999,
        q_end: float = 0.9,
        decay: float = 0.99,
        relative_error: float = 1e-3,
        min_unit: float = 1.0,
        max_tokens: int = 512,
        max_length: int = 16,
    ) -> IncentiveTokenizer:
        """Builds the vocabulary of ``amounts`` `(N,)` and measures it; options as in `goal_kernels.build_vocabulary`.

        Raises:
            ConfigurationError: bad amounts or options, or an amount that needs more than ``max_length`` tokens.
        """
        array = _as_amounts(amounts)
        try:
            values = build_vocabulary(
                array,
                q_start=q_start,
                q_end=q_end,
                decay=decay,
                relative_error=relative_error,
                min_unit=min_unit,
                max_tokens=max_tokens,
            )
            statistics = measure(in_chunks(array), values, max_length=max_length)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"cannot fit a vocabulary: {error}") from error
        return cls(values, max_length=max_length, statistics=statistics)

    @classmethod
    def fit_parquet(
        cls,
        path: str | Path,
        column: str,
        *,
        q_start: float = 0.9999,
        q_end: float = 0.9,
        decay: float = 0.99,
        relative_error: float = 1e-3,
        min_unit: float = 1.0,
        max_tokens: int = 512,
        max_length: int = 16,
    ) -> IncentiveTokenizer:
        """As `fit`, over a Parquet file or a folder of them, with one row group in memory at a time.

        The vocabulary is that of `fit` on all amounts while there are at most about a million distinct ones; beyond
        that its percentiles are off by the rank error that `goal_kernels.VocabularyAccumulator` states. The statistics
        cover every amount either way.

        Raises:
            LogError: the file or the column cannot be used.
            ConfigurationError: as in `fit`.
        """
        accumulator = VocabularyAccumulator()
        kinds = set()
        try:
            for chunk in parquet_amounts(path, column):
                accumulator.add(chunk)
                kinds.add(chunk.dtype)
            values = accumulator.build(
                q_start=q_start,
                q_end=q_end,
                decay=decay,
                relative_error=relative_error,
                min_unit=min_unit,
                max_tokens=max_tokens,
            )
            chunks = parquet_amounts(path, column)
            if accumulator.exact and len(kinds) == 1:
                amounts, counts = accumulator.counted()
                amounts = np.append(0.0, amounts).astype(kinds.pop())
                chunks = [(amounts, np.append(np.uint64(accumulator.zeros), counts))]
            statistics = measure(chunks, values, max_length=max_length)
        except LogError:
            raise
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"cannot fit a vocabulary to column {column!r} of {path}: {error}") from error
        return cls(values, max_length=max_length, statistics=statistics)

    @property
    def values(self) -> np.ndarray:
        """Values of the value tokens, `(size - 3,)` float64, descending, read-only."""
        return self._values

    @property
    def token_values(self) -> np.ndarray:
        """Value of every id, `(size,)` float64, 0 for PAD, SOS and EOS, read-only."""
        return self._token_values

    @property
    def size(self) -> int:
        """Number of ids, special tokens included (V)."""
        return len(self._token_values)

    @property
    def max_length(self) -> int:
        """Most value tokens in a sequence; with SOS and EOS a sequence has up to ``max_length + 2`` ids."""
        return self._max_length

    @property
    def min_unit(self) -> float:
        """Smallest value."""
        return float(self._values[-1])

    def encode(self, amounts: Any, *, width: int | None = None) -> torch.Tensor:
        """Ids of ``amounts`` `(N,)`: `(N, T)` int64, each row SOS, the value tokens, EOS, then PAD.

        ``T`` is what the longest of these amounts needs, or ``width``.

        Raises:
            ConfigurationError: a bad amount, one that needs more than `max_length` tokens, or ``width`` too small.
        """
        try:
            tokens, lengths = encode(_as_amounts(amounts), self._values, max_length=self._max_length)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        longest = int(lengths.max(initial=0))
        if width is not None and width < longest + 2:
            raise ConfigurationError(f"width is {width}, but these amounts need {longest + 2} ids with SOS and EOS")
        columns = longest + 2 if width is None else width
        ids = torch.zeros((len(lengths), columns), dtype=torch.int64)
        ids[:, 0] = SOS
        used = torch.from_numpy(tokens[:, :longest])
        ids[:, 1 : 1 + longest] = torch.where(used >= 0, used + SPECIAL_TOKENS, PAD)
        ids[torch.arange(len(lengths)), torch.from_numpy(lengths).long() + 1] = EOS
        return ids

    def decode(self, ids: Any) -> torch.Tensor:
        """Amounts `(...)` float64 of ids `(..., T)` int64: the sum of the values before the first EOS.

        Raises:
            ConfigurationError: ids of another type, or outside 0 to ``size - 1``.
        """
        given = torch.as_tensor(ids)
        if given.dtype not in (torch.int32, torch.int64) or given.ndim < 1:
            raise ConfigurationError(
                f"ids has dtype {given.dtype} and shape {tuple(given.shape)}, expected int64 of shape (..., T)"
            )
        flat = given.detach().cpu().reshape(given.shape[:-1].numel(), given.shape[-1])
        outside = (flat < 0) | (flat >= self.size)
        if outside.any():
            raise ConfigurationError(f"ids holds {int(flat[outside][0])}, expected 0 to {self.size - 1}")
        ended = (flat == EOS).cumsum(dim=1) > 0
        tokens = torch.where(ended | (flat < SPECIAL_TOKENS), -1, flat - SPECIAL_TOKENS)
        amounts = torch.from_numpy(decode(tokens.numpy(), self._values))
        return amounts.reshape(given.shape[:-1]).to(given.device)

    def writes(self, amounts: Any) -> np.ndarray:
        """Whether each of ``amounts`` `(N,)` comes back from its tokens, `(N,)` bool; others get a smaller one's.

        A difference as small as the rounding of float32 is forgiven.

        Raises:
            ConfigurationError: as in `encode`.
        """
        given = _as_amounts(amounts).astype(np.float64)
        error = np.abs(self.decode(self.encode(given)).numpy() - given)
        return error <= np.maximum(1e-6 * self.min_unit, np.spacing(given.astype(np.float32)))

    def save(self, directory: str | Path) -> Path:
        """Writes ``directory``/vocabulary.json and returns its path."""
        path = Path(directory) / FILE_NAME
        content = {
            "format": FORMAT,
            "values": self._values.tolist(),
            "max_length": self._max_length,
            "statistics": None if self.statistics is None else asdict(self.statistics),
        }
        write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())
        return path

    @classmethod
    def load(cls, directory: str | Path) -> IncentiveTokenizer:
        """Reads what `save` wrote.

        Raises:
            ConfigurationError: the file is missing or is not a vocabulary.
        """
        path = Path(directory) / FILE_NAME
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise ConfigurationError(f"{path} has format {content['format']}, this version reads {FORMAT}")
            given = content["statistics"]
            statistics = None
            if given is not None:
                statistics = FitStatistics(**{**given, "length_counts": tuple(given["length_counts"])})
            return cls(content["values"], max_length=content["max_length"], statistics=statistics)
        except OSError as error:
            raise ConfigurationError(f"cannot read a vocabulary from {path}: {error}") from error
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ConfigurationError(f"{path} is not a vocabulary file ({error!r}): save it again") from error

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, IncentiveTokenizer):
            return NotImplemented
        return self._max_length == other._max_length and np.array_equal(self._values, other._values)

    def __hash__(self) -> int:
        return hash((self._max_length, self._values.tobytes()))

    def __repr__(self) -> str:
        values = self._values
        return (
            f"IncentiveTokenizer({len(values)} values, {values[0]:g} to {values[-1]:g}, max_length={self._max_length})"
        )


def _as_amounts(amounts: Any) -> np.ndarray:
    if isinstance(amounts, torch.Tensor):
        amounts = amounts.detach().cpu().numpy()
    return np.asarray(amounts, dtype=np.float64) if isinstance(amounts, (list, tuple)) else np.asarray(amounts)
