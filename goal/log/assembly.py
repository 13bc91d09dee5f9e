"""Builds a log from batches in any order: checks them, spools the columns, sorts the rows by (user, time[, order]).

Memory stays bounded by a batch, the distinct users and (in a folder) a block of rows, whatever the length of the log:
columns are appended to files, the rows moved into blocks of neighbouring users, and each block sorted on its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from goal.errors import LogError
from goal.log import conversion
from goal.log.codes import Codes
from goal.log.conversion import Place
from goal.log.schema import Schema
from goal.log.storage import Column

_BLOCK_BYTES = 1 << 24


class LogAssembler:
    """Takes batches with ``append`` and returns the fields of an ``InteractionLog`` with ``finish``.

    Args:
        schema: roles of the columns.
        folder: an existing folder for the arrays, which are then memory-mapped; None keeps them in memory.
        categories: the values of each categorical column, where they are already settled (a trained policy's); any
            other value then counts as unknown.
        typeless: the source has no types (CSV), so ids that all spell whole numbers are whole numbers.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        folder: Path | None = None,
        categories: Sequence[Sequence[str]] | None = None,
        typeless: bool = False,
    ) -> None:
        self.schema = schema
        self.folder = folder
        self.rows = 0
        if categories is not None and len(categories) != len(schema.categorical):
            raise LogError(
                f"categories: {len(categories)} lists came; the schema names {len(schema.categorical)} such columns"
            )
        self._users = Codes()
        self._typeless = typeless
        self._categories = [Codes(values) for values in categories or [None] * len(schema.categorical)]
        self._kinds: dict[str, tuple[str, str]] = {}
        self._starts: list[int] = []
        self._places: list[Place] = []
        width = len(schema.numeric), len(schema.categorical), len(schema.objectives)
        self._columns = {
            "user": Column(folder, "user", np.int64),
            "row": Column(folder, "row", np.int64),
            "time": Column(folder, "time", np.float64),
            "numeric": Column(folder, "numeric", np.float32, width[0]),
            "categorical": Column(folder, "categorical", np.int64, width[1]),
            "incentives": Column(folder, "incentives", np.float64),
            "revenue": Column(folder, "revenue", np.float64),
            "cost": Column(folder, "cost", np.float64),
            "objectives": Column(folder, "objectives", np.float32, width[2]),
        }
        if schema.multiplier is not None:
            self._columns["multiplier"] = Column(folder, "multiplier", np.float32)
        if schema.propensity is not None:
            self._columns["propensity"] = Column(folder, "propensity", np.float64)

    def append(self, columns: Mapping[str, pa.Array], place: Place) -> None:
        """Check one batch and keep it.

        Raises:
            LogError: a value breaks a rule; the message names column, row and value.
        """
        schema = self.schema
        rows = len(columns[schema.user])
        if rows == 0:
            return
        users, kind = conversion.keys(schema.user, columns[schema.user], place)
        self._same_kind(schema.user, kind, place)
        time, kind = conversion.seconds(schema.time, columns[schema.time], place)
        self._same_kind(schema.time, kind, place)
        batch = {"user": self._users.encode(users), "row": np.arange(self.rows, self.rows + rows), "time": time}
        if schema.order is not None:
            order, kind = conversion.order_keys(schema.order, columns[schema.order], place)
            self._same_kind(schema.order, kind, place)
            if "order" not in self._columns:
                self._columns["order"] = Column(self.folder, "order", order.dtype)
            batch["order"] = order

        def read(name: str) -> np.ndarray:
            return conversion.numbers(name, columns[name], place)

        def amounts(name: str) -> np.ndarray:
            values = read(name)
            conversion.require(
                name, values, conversion.non_negative(values), place, "a finite amount that is not negative"
            )
            _to_float32(name, values, place)  # windows hold amounts so
            return values

        batch["incentives"] = amounts(schema.incentive)
        batch["revenue"] = amounts(schema.revenue)
        batch["cost"] = batch["incentives"] * (schema.cost_rate or 1.0) if schema.cost is None else amounts(schema.cost)
        numeric = np.empty((rows, len(schema.numeric)), dtype=np.float32)
        for i, name in enumerate(schema.numeric):
            values = read(name)
            conversion.require(
                name, values, ~np.isinf(values), place, "a finite number, or nothing where it is missing"
            )
            numeric[:, i] = _to_float32(name, values, place)
            if name == schema.clock:
                self._check_clock(values, users, place)
        categorical = np.empty((rows, len(schema.categorical)), dtype=np.int64)
        for i, name in enumerate(schema.categorical):
            categorical[:, i] = self._categories[i].encode(conversion.labels(name, columns[name], place))
        objectives = np.empty((rows, len(schema.objectives)), dtype=np.float32)
        for i, objective in enumerate(schema.objectives):
            values = amounts(objective.name)
            if objective.kind == "binary":
                conversion.require(objective.name, values, (values == 0) | (values == 1), place, "0 or 1 (binary)")
            objectives[:, i] = _to_float32(objective.name, values, place)
        batch |= {"numeric": numeric, "categorical": categorical, "objectives": objectives}
        if schema.multiplier is not None:
            batch["multiplier"] = _to_float32(schema.multiplier, amounts(schema.multiplier), place)
        if schema.propensity is not None:
            values = read(schema.propensity)
            conversion.require(
                schema.propensity, values, (values > 0) & (values <= 1), place, "a probability in (0, 1]"
            )
            batch["propensity"] = values
        for name, values in batch.items():
            self._columns[name].append(values)
        self._starts.append(self.rows)
        self._places.append(place)
        self.rows += rows

    def finish(self) -> dict[str, Any]:
        """Sort the rows and return the fields of an ``InteractionLog``.

        Raises:
            LogError: no rows came, two events of a user have one time that no order column breaks, or a user has more
                events than the horizon.
        """
        if self.rows == 0:
            raise LogError("the log has no rows; a log needs at least one event")
        if self._typeless:
            self._users.to_integers()
        ids, ranks = self._users.sorted()
        counts = np.zeros(len(ids), dtype=np.int64)
        grouped, previous = True, 0
        for low, high in self._runs():
            user = ranks[self._columns["user"].read(low, high)]
            counts += np.bincount(user, minlength=len(ids))
            grouped = grouped and previous <= user[0] and bool((user[1:] >= user[:-1]).all())
            previous = user[-1]
        self._check_horizon(ids, counts)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        categories = [codes.sorted() for codes in self._categories]
        remaps = [np.append(places + 1, 0) for _, places in categories]  # code -1, unknown or missing, becomes 0
        cuts = self._regroup(ranks, offsets, grouped)
        for first, last in pairwise(cuts):
            self._sort(ids, ranks, int(offsets[first]), int(offsets[last]), remaps)
        for name in ("user", "row", "order"):
            if name in self._columns:
                self._columns.pop(name).drop()
        fields: dict[str, Any] = {name: column.finish() for name, column in self._columns.items()}
        return {
            "schema": self.schema,
            "user_ids": ids,
            "offsets": offsets,
            "categories": tuple(tuple(values.tolist()) for values, _ in categories),
            "multiplier": None,
            "propensity": None,
        } | fields

    def close(self) -> None:
        """Close the files, which stay in the folder."""
        for column in self._columns.values():
            column.close()

    @property
    def _block_rows(self) -> int:
        return max(1024, _BLOCK_BYTES // max(column.row_bytes for column in self._columns.values()))

    def _runs(self) -> Iterator[tuple[int, int]]:
        for low in range(0, self.rows, self._block_rows):
            yield low, min(low + self._block_rows, self.rows)

    def _regroup(self, ranks: np.ndarray, offsets: np.ndarray, grouped: bool) -> np.ndarray:
        """Move the rows into blocks of neighbouring users; return the users at which blocks begin, and U."""
        users = len(offsets) - 1
        cuts = [0]
        while cuts[-1] < users:
            fitting = bisect_right(offsets, offsets[cuts[-1]] + self._block_rows) - 1
            cuts.append(max(fitting, cuts[-1] + 1))  # a user with more rows than a block is a block
        block_of_code = np.repeat(np.arange(len(cuts) - 1), np.diff(cuts))[ranks]
        if len(cuts) <= np.iinfo(np.uint16).max:
            block_of_code = block_of_code.astype(np.uint16)  # NumPy sorts 16 bits by radix

        def moves() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            for low, high in self._runs():
                block = block_of_code[self._columns["user"].read(low, high)]
                yield np.argsort(block, kind="stable"), np.bincount(block, minlength=len(cuts) - 1)

        if len(cuts) > 2 and not grouped:
            # The users say where everything goes, so they go last.
            for name in sorted(self._columns, key=lambda name: name == "user"):
                self._columns[name].regroup(moves(), offsets[cuts[:-1]])
        return np.array(cuts)

    def _sort(self, ids: np.ndarray, ranks: np.ndarray, low: int, high: int, remaps: list[np.ndarray]) -> None:
        """Sort the rows of a block by user, time and order, and give its categories their final codes."""
        ranked = [self._columns["time"].read(low, high), ranks[self._columns["user"].read(low, high)]]
        if self.schema.order is not None:
            ranked.insert(0, self._columns["order"].read(low, high))
        if not _increasing(ranked):
            # Logs mostly come in the order of time, where these sorts take linear time; so does one of 16 bits.
            moved = np.lexsort(ranked[:-1])
            user = ranked[-1] - ranked[-1].min()
            user = user.astype(np.uint16) if user.max() <= np.iinfo(np.uint16).max else user
            moved = moved[np.argsort(user[moved], kind="stable")]
            self._check_ties(ids, [values[moved] for values in ranked], low, high, moved)
            for column in self._columns.values():
                column.write(low, column.read(low, high)[moved])
        if remaps:
            codes = self._columns["categorical"].read(low, high)
            codes = np.stack([remap[codes[:, i]] for i, remap in enumerate(remaps)], axis=1)
            self._columns["categorical"].write(low, codes)

    def _check_ties(self, ids: np.ndarray, ranked: list[np.ndarray], low: int, high: int, moved: np.ndarray) -> None:
        same = np.ones(len(moved) - 1, dtype=bool)
        for values in ranked:
            same &= values[1:] == values[:-1]
        if not same.any():
            return
        i = int(np.argmax(same))
        user, time = ids[ranked[-1][i]].item(), float(ranked[-2][i])
        rows = self._columns["row"].read(low, high)[moved[i : i + 2]]
        where = " and ".join(self._row(row) for row in rows.tolist())
        column = self.schema.time
        when = (
            f"the time {np.datetime64(round(time * 1e6), 'us')}"
            if self._kinds[column][0] == "timestamp"
            else f"{time!r}"
        )
        if self.schema.order is None:
            raise LogError(
                f"column {column!r}, {where}: user {user!r} has two events at {when}; name a column that orders them "
                "as 'order' in the schema, or make the times differ"
            )
        raise LogError(
            f"column {self.schema.order!r}, {where}: user {user!r} has two events at {when} with the same order "
            f"{ranked[0][i].item()!r}; the order column must break every tie"
        )

    def _check_clock(self, values: np.ndarray, users: pa.Array, place: Place) -> None:
        good = (values >= 0) & (values <= 1)
        if not good.all():
            row = int(np.argmin(good))
            raise LogError(
                f"column {self.schema.clock!r}, {place.row(row)}: user {users[row].as_py()!r} has the clock "
                f"{values[row]:g}; expected the share of the episode that has passed, a finite number in [0, 1]: "
                "divide the place in the episode by the horizon, or leave the clock out of the schema"
            )

    def _check_horizon(self, ids: np.ndarray, counts: np.ndarray) -> None:
        horizon = self.schema.horizon
        if horizon is not None and counts.max() > horizon:
            long = int(np.argmax(counts > horizon))
            raise LogError(
                f"column {self.schema.user!r}: user {ids[long].item()!r} has {counts[long]} events, and the schema "
                f"ends an episode after {horizon}; give each episode a user of its own, or leave the horizon out"
            )

    def _same_kind(self, column: str, kind: str, place: Place) -> None:
        earlier, row = self._kinds.setdefault(column, (kind, place.row(0)))
        if earlier != kind:
            raise LogError(
                f"column {column!r}, {place.row(0)}: mixed types: {kind} came where {row} holds {earlier}; "
                "give the column one type"
            )

    def _row(self, row: int) -> str:
        batch = bisect_right(self._starts, row) - 1
        return self._places[batch].row(row - self._starts[batch])


def _increasing(ranked: list[np.ndarray]) -> bool:
    """Say whether rows strictly increase by the last array, then the one before, and so on (as np.lexsort)."""
    result = np.zeros(len(ranked[0]) - 1, dtype=bool)
    for values in ranked:
        result = (values[1:] > values[:-1]) | ((values[1:] == values[:-1]) & result)
    return bool(result.all())


def _to_float32(name: str, values: np.ndarray, place: Place) -> np.ndarray:
    conversion.require(
        name, values, ~(np.abs(values) > np.finfo(np.float32).max), place, "a number in the range of float32"
    )
    return values.astype(np.float32)
