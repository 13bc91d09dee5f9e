"""The interaction log: one row a decision, sorted by (user, time[, order]), column by column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from goal.errors import LogError, SchemaError
from goal.log import conversion
from goal.log.assembly import LogAssembler
from goal.log.conversion import Place
from goal.log.schema import Schema, suggestion


@dataclass(frozen=True, eq=False)
class InteractionLog:
    """N events of U users, with F numeric features, C categorical features and K further objectives.

    Build it with ``read`` or ``from_columns``, which check and sort; the constructor takes the arrays as they are. Rows
    of user u are ``offsets[u]:offsets[u + 1]``, in time order. Arrays may be memory-mapped and read-only.

    Attributes:
        schema: roles of the columns.
        user_ids: `(U,)` ids as they were given, ascending.
        offsets: `(U+1,)` int64.
        time: `(N,)` float64; seconds since 1970 UTC for timestamps and dates, else the number given.
        numeric: `(N, F)` float32; NaN is missing.
        categorical: `(N, C)` int64 codes; 0 is unknown or missing, code i + 1 of column c is ``categories[c][i]``.
        categories: the values of each categorical column.
        incentives: `(N,)` float64 amounts paid, in the schema's incentive unit.
        revenue: `(N,)` float64, in the schema's currency.
        cost: `(N,)` float64, in the schema's currency.
        objectives: `(N, K)` float32.
        multiplier: `(N,)` float32 logged multipliers, or None.
        propensity: `(N,)` float64 probabilities of the logged amounts, or None.
    """

    schema: Schema
    user_ids: np.ndarray
    offsets: np.ndarray
    time: np.ndarray
    numeric: np.ndarray
    categorical: np.ndarray
    categories: tuple[tuple[str, ...], ...]
    incentives: np.ndarray
    revenue: np.ndarray
    cost: np.ndarray
    objectives: np.ndarray
    multiplier: np.ndarray | None = None
    propensity: np.ndarray | None = None

    @classmethod
    def from_columns(
        cls,
        schema: Schema,
        columns: Mapping[str, Any],
        *,
        categories: Sequence[Sequence[str]] | None = None,
    ) -> InteractionLog:
        """Check and sort plain arrays, in any row order.

        Args:
            schema: roles of the columns.
            columns: one-dimensional array of N values by column name; names that the schema does not use are ignored.
            categories: values of each categorical column where they are settled already; others count as unknown.

        Returns:
            The log, in memory.

        Raises:
            SchemaError: a column is missing.
            LogError: a value breaks a rule, or the columns differ in length.
        """
        require_columns(schema, list(columns), "the columns given")
        arrays = {name: conversion.from_numpy(name, columns[name]) for name in schema.columns}
        rows = len(arrays[schema.user])
        for name, array in arrays.items():
            if len(array) != rows:
                raise LogError(f"column {name!r}: has {len(array)} values where {schema.user!r} has {rows}")
        assembler = LogAssembler(schema, categories=categories)
        assembler.append(arrays, Place())
        return cls(**assembler.finish())

    def __len__(self) -> int:
        return len(self.time)

    def __repr__(self) -> str:
        return f"InteractionLog({self.events} events of {self.users} users)"

    @property
    def events(self) -> int:
        """N."""
        return len(self.time)

    @property
    def users(self) -> int:
        """U."""
        return len(self.user_ids)

    @cached_property
    def user_index(self) -> np.ndarray:
        """`(N,)` int64 index of each row's user, kept in memory; ``locate`` answers for some rows without that."""
        return np.repeat(np.arange(self.users), np.diff(self.offsets))

    @cached_property
    def position(self) -> np.ndarray:
        """`(N,)` int64 step of each row within its user, from 0, kept in memory."""
        return np.arange(self.events) - np.repeat(self.offsets[:-1], np.diff(self.offsets))

    @cached_property
    def outcomes(self) -> np.ndarray:
        """`(N, 1+K)` float32: the revenue, then the objectives, kept in memory."""
        result = np.empty((self.events, 1 + self.objectives.shape[1]), dtype=np.float32)
        result[:, 0] = self.revenue
        result[:, 1:] = self.objectives
        return result

    def locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the user index and the position within the user of each of ``rows``."""
        user = np.searchsorted(self.offsets, rows, side="right") - 1
        return user, rows - self.offsets[user]

    def select_users(self, users: np.ndarray | Sequence[int]) -> InteractionLog:
        """Return the log of some users, in the order given (views where they are a run of neighbours).

        Args:
            users: distinct user indices in [0, U), or a `(U,)` boolean mask.

        Raises:
            LogError: an index is out of range, repeated, or none came.
        """
        users = np.asarray(users)
        if users.dtype == bool and users.shape == (self.users,):
            users = np.flatnonzero(users)
        if users.ndim != 1 or len(users) == 0 or not np.issubdtype(users.dtype, np.integer):
            raise LogError(f"users: {users!r} came; expected one or more user indices, or a mask of {self.users} users")
        if users.min() < 0 or users.max() >= self.users:
            raise LogError(f"users: indices {users.min()} to {users.max()} came; expected 0 to {self.users - 1}")
        if len(np.unique(users)) < len(users):
            raise LogError("users: an index is repeated; a log holds each user once")
        lengths = np.diff(self.offsets)[users]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        if (np.diff(users) == 1).all():
            rows: slice | np.ndarray = slice(int(self.offsets[users[0]]), int(self.offsets[users[-1] + 1]))
        else:
            rows = np.arange(offsets[-1]) + np.repeat(self.offsets[users] - offsets[:-1], lengths)
        return self._take(rows, user_ids=self.user_ids[users], offsets=offsets)

    def keep_categories(self, rows: np.ndarray, *, minimum: int = 1) -> InteractionLog:
        """Return the log with only the categories that ``rows`` hold at least ``minimum`` times; others become unknown.

        A category that training never saw would otherwise reach an embedding that nothing has trained.
        """
        categories = []
        codes = np.empty(self.categorical.shape, dtype=np.int64)
        for c, values in enumerate(self.categories):
            counts = np.bincount(self.categorical[rows, c], minlength=len(values) + 1)
            kept = counts >= minimum
            kept[0] = False
            categories.append(tuple(value for value, keep in zip(values, kept[1:], strict=True) if keep))
            codes[:, c] = np.where(kept, np.cumsum(kept), 0)[self.categorical[:, c]]
        return replace(self, categories=tuple(categories), categorical=codes)

    def _take(self, rows: slice | np.ndarray, **changes: Any) -> InteractionLog:
        names = ("time", "numeric", "categorical", "incentives", "revenue", "cost", "objectives")
        taken = {name: getattr(self, name)[rows] for name in names}
        for name in ("multiplier", "propensity"):
            values = getattr(self, name)
            taken[name] = None if values is None else values[rows]
        return replace(self, **taken, **changes)


def require_columns(schema: Schema, available: Sequence[str], where: str) -> None:
    """Raise SchemaError for the first column of the schema that is not available."""
    for name in schema.columns:
        if name not in available:
            raise SchemaError(
                f"column {name!r} is not in {where}.{suggestion(name, available)} Available: {', '.join(available)}"
            )
