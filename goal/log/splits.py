"""Splits of a log by time or by user, never by random row: a random row's neighbours would tell its outcome."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from goal.errors import ConfigurationError
from goal.log.interaction_log import InteractionLog

Boundary = float | str | dt.date | np.datetime64


@dataclass(frozen=True, eq=False)
class Splits:
    """Ascending row indices of a log's three parts: int64 arrays that are disjoint and together hold every row."""

    training: np.ndarray
    calibration: np.ndarray
    test: np.ndarray

    def __repr__(self) -> str:
        return f"Splits(training={len(self.training)}, calibration={len(self.calibration)}, test={len(self.test)})"


def split_by_time(
    log: InteractionLog,
    *,
    fractions: tuple[float, float, float] = (0.7, 0.15, 0.15),
    boundaries: tuple[Boundary, Boundary] | None = None,
) -> Splits:
    """Split by time: every training event is before every calibration event, and those before every test event.

    Events at one time stay together, so the shares may differ a little from ``fractions``.

    Args:
        log: the log.
        fractions: shares of the events for training, calibration and test; used where ``boundaries`` is None.
        boundaries: (first time of calibration, first time of test): numbers as in ``log.time``, or ISO text, dates or
            datetimes, which mean seconds since 1970 (UTC unless they carry a zone). Equal boundaries leave calibration
            empty.

    Raises:
        ConfigurationError: the fractions or boundaries cannot work, or leave a part without events.
    """
    if boundaries is None:
        shares = _check_fractions(fractions)
        cuts = np.ceil(np.cumsum(shares)[:2] * log.events - 1e-9).astype(np.int64)
        times = np.asarray(log.time)
        within = cuts < log.events
        ordered = np.partition(times, np.unique(cuts[within])) if within.any() else times
        first, second = (float(ordered[cut]) if cut < log.events else np.inf for cut in cuts)
        if shares[0] == 0:
            first = -np.inf
        allowed_empty = [share == 0 for share in shares]
        asked = f"fractions {tuple(shares.tolist())}"
    else:
        if len(boundaries) != 2:
            raise ConfigurationError(
                f"boundaries: {boundaries!r} came; expected the first times of calibration and test"
            )
        first, second = (_to_time(boundary) for boundary in boundaries)
        if not first <= second:
            raise ConfigurationError(f"boundaries: {boundaries!r} came; calibration must begin before the test")
        allowed_empty = [False, first == second, False]
        asked = f"boundaries {boundaries!r}"
    early = log.time < first
    late = log.time >= second
    splits = Splits(np.flatnonzero(early), np.flatnonzero(~early & ~late), np.flatnonzero(late))
    _require_parts(splits, allowed_empty, f"{asked}: the log's times run from {log.time.min()} to {log.time.max()}")
    return splits


def split_by_user(
    log: InteractionLog, fractions: tuple[float, float, float] = (0.7, 0.15, 0.15), seed: int = 0
) -> Splits:
    """Split by user, at random: each user's events all belong to one part.

    Args:
        log: the log.
        fractions: shares of the users for training, calibration and test.
        seed: of the shuffle.

    Raises:
        ConfigurationError: the fractions cannot work, or leave a part without users.
    """
    shares = _check_fractions(fractions)
    cuts = np.rint(np.cumsum(shares)[:2] * log.users).astype(np.int64)
    part = np.empty(log.users, dtype=np.int8)
    shuffled = np.random.default_rng(seed).permutation(log.users)
    for number, users in enumerate(np.split(shuffled, cuts)):
        part[users] = number
    parts = np.repeat(part, np.diff(log.offsets))
    splits = Splits(*(np.flatnonzero(parts == number) for number in range(3)))
    _require_parts(
        splits, [share == 0 for share in shares], f"fractions {tuple(shares.tolist())}: the log has {log.users} users"
    )
    return splits


def _check_fractions(fractions: Sequence[float]) -> np.ndarray:
    shares = np.asarray(fractions, dtype=np.float64)
    if shares.shape != (3,) or not np.isfinite(shares).all() or (shares < 0).any() or abs(shares.sum() - 1) > 1e-9:
        raise ConfigurationError(
            f"fractions: {fractions!r} came; expected three shares (training, calibration, test) that are not negative "
            "and sum to 1"
        )
    return shares


def _require_parts(splits: Splits, allowed_empty: Sequence[bool], asked: str) -> None:
    for name, allowed in zip(("training", "calibration", "test"), allowed_empty, strict=True):
        if len(getattr(splits, name)) == 0 and not allowed:
            raise ConfigurationError(f"{asked}, and {name} would hold no event; move the split")


def _to_time(boundary: Boundary) -> float:
    if isinstance(boundary, str):
        try:
            boundary = dt.datetime.fromisoformat(boundary)
        except ValueError:
            raise ConfigurationError(
                f"boundaries: {boundary!r} cannot be read as a time; expected ISO 8601 such as 2024-01-31T18:30:00"
            ) from None
    if isinstance(boundary, np.datetime64):
        boundary = (boundary - np.datetime64(0, "s")) / np.timedelta64(1, "s")
    elif isinstance(boundary, dt.date):
        if not isinstance(boundary, dt.datetime):
            boundary = dt.datetime.combine(boundary, dt.time())
        if boundary.tzinfo is None:
            boundary = boundary.replace(tzinfo=dt.UTC)
        boundary = boundary.timestamp()
    if isinstance(boundary, bool) or not isinstance(boundary, (int, float, np.number)) or np.isnan(boundary):
        raise ConfigurationError(f"boundaries: {boundary!r} came; expected a number, a date, a datetime or ISO text")
    return float(boundary)
