"""A batch of windows, as the encoder takes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch

from goal.errors import LogError


@dataclass(frozen=True, eq=False)
class History:
    """B windows of up to L events, right-padded with zeros.

    The event at ``lengths - 1`` is the pending one: its features are known, its incentive and outcomes are 0 and never
    read (docs/decisions.md 9). A new user's window is that one event.

    Attributes:
        numeric: `(B, L, F)` float32 features; NaN is missing.
        categorical: `(B, L, C)` int64 codes; 0 is unknown or missing.
        incentives: `(B, L)` float32 amounts, in the log's unit.
        outcomes: `(B, L, O)` float32: the revenue, then the further objectives.
        lengths: `(B,)` int64, in [1, L].
    """

    numeric: torch.Tensor
    categorical: torch.Tensor
    incentives: torch.Tensor
    outcomes: torch.Tensor
    lengths: torch.Tensor

    def __len__(self) -> int:
        return self.lengths.shape[0]

    @property
    def window(self) -> int:
        """L, the padded length."""
        return self.incentives.shape[1]

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.lengths.device

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> History:
        """Return the batch on another device."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def select(self, rows: torch.Tensor | slice) -> History:
        """Return some windows: indices, a mask or a slice along B."""
        return self._each(lambda tensor: tensor[rows])

    def repeat_interleave(self, repeats: int) -> History:
        """Return each window ``repeats`` times in a row, as `(B * repeats, ...)`."""
        return self._each(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def last(self, events: int) -> History:
        """Return the last ``events`` events of each window; shorter ones stay whole, and so does a shorter batch."""
        if events >= self.window:
            return self
        skipped = (self.lengths - events).clamp(min=0)
        place = skipped[:, None] + torch.arange(events, device=self.device)
        rows = torch.arange(len(self), device=self.device)[:, None]
        return History(
            self.numeric[rows, place],
            self.categorical[rows, place],
            self.incentives[rows, place],
            self.outcomes[rows, place],
            self.lengths.clamp(max=events),
        )

    def followed_by(
        self, incentives: torch.Tensor, outcomes: torch.Tensor, numeric: torch.Tensor, categorical: torch.Tensor
    ) -> History:
        """Return the windows one event on; of a full one the first event is left out.

        Args:
            incentives: `(B,)` what was paid at the pending events.
            outcomes: `(B, O)` what came of it.
            numeric: `(B, F)` features of the events that follow, which are pending then.
            categorical: `(B, C)` likewise.
        """
        rows, full = torch.arange(len(self), device=self.device), self.lengths == self.window
        last, following = self.lengths - 1, self.lengths.clamp(max=self.window - 1)

        def moved(column: torch.Tensor, done: torch.Tensor | None, pending: torch.Tensor | None) -> torch.Tensor:
            column = column.clone()
            if done is not None:
                column[rows, last] = done.to(column.dtype)
            column[full] = torch.cat([column[full, 1:], torch.zeros_like(column[full, :1])], dim=1)
            if pending is not None:
                column[rows, following] = pending.to(column.dtype)
            return column

        return History(
            moved(self.numeric, None, numeric),
            moved(self.categorical, None, categorical),
            moved(self.incentives, incentives, None),
            moved(self.outcomes, outcomes, None),
            following + 1,
        )

    @staticmethod
    def cat(parts: Sequence[History]) -> History:
        """Return the windows of several batches of one padded length, one after another."""
        columns = ([getattr(part, field.name) for part in parts] for field in fields(History))
        return History(*(torch.cat(column) for column in columns))

    def validate(self) -> None:
        """Check shapes, types and values. Reading values waits for a GPU, so call it where data enter, not in a loop.

        Raises:
            LogError: the message names the tensor, what it holds and what was expected.
        """
        for field, (rank, dtype) in _EXPECTED.items():
            tensor = getattr(self, field)
            if not isinstance(tensor, torch.Tensor):
                raise LogError(f"history.{field}: a {type(tensor).__name__} came; expected a torch.Tensor")
            if tensor.ndim != rank or tensor.dtype != dtype:
                raise LogError(
                    f"history.{field}: shape {tuple(tensor.shape)} and {tensor.dtype} came; expected {rank} dimensions "
                    f"{_SHAPES[field]} and {dtype}"
                )
            if tensor.device != self.device:
                raise LogError(f"history.{field}: is on {tensor.device}, lengths on {self.device}; move it with .to()")
        size = tuple(self.incentives.shape)
        if size[1] < 1:
            raise LogError(f"history.incentives: shape {size} came; a window needs at least one event, the pending one")
        for field in ("numeric", "categorical", "outcomes"):
            if tuple(getattr(self, field).shape[:2]) != size:
                raise LogError(f"history.{field}: shape {tuple(getattr(self, field).shape)} does not begin with {size}")
        if len(self) != size[0]:
            raise LogError(f"history.lengths: {len(self)} values came for {size[0]} windows")
        if self.outcomes.shape[2] < 1:
            raise LogError("history.outcomes: no outcome came; the first must be the revenue")
        if len(self) == 0:
            return
        bad = (self.lengths < 1) | (self.lengths > size[1])
        if bad.any():
            row = int(bad.int().argmax())
            raise LogError(f"history.lengths: window {row} has {int(self.lengths[row])}; expected 1 to {size[1]}")
        self._validate_values()

    def _validate_values(self) -> None:
        step = torch.arange(self.window, device=self.device)
        padding = step >= self.lengths[:, None]
        pending = step >= self.lengths[:, None] - 1
        past = ~pending

        def forbid(field: str, bad: torch.Tensor, expected: str) -> None:
            if bad.ndim == 3:
                bad = bad.any(dim=2)
            if bad.any():
                row, event = divmod(int(bad.flatten().int().argmax()), self.window)
                value = getattr(self, field)[row, event].tolist()
                raise LogError(f"history.{field}: window {row}, event {event} holds {value}; expected {expected}")

        forbid("numeric", padding[..., None] & (self.numeric != 0), "0 in the padding")
        forbid("numeric", self.numeric.isinf(), "finite numbers, NaN where one is missing")
        forbid("categorical", padding[..., None] & (self.categorical != 0), "0 in the padding")
        forbid("categorical", self.categorical < 0, "codes from 0 on")
        why = "0 for the pending event and in the padding, since nothing is known of them yet"
        forbid("incentives", pending & (self.incentives != 0), why)
        forbid("outcomes", pending[..., None] & (self.outcomes != 0), why)
        good = (self.incentives >= 0) & self.incentives.isfinite()
        forbid("incentives", past & ~good, "finite amounts that are not negative")
        forbid("outcomes", past[..., None] & ~self.outcomes.isfinite(), "finite outcomes")

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> History:
        return History(*(change(getattr(self, field.name)) for field in fields(self)))


_EXPECTED = {
    "lengths": (1, torch.int64),
    "numeric": (3, torch.float32),
    "categorical": (3, torch.int64),
    "incentives": (2, torch.float32),
    "outcomes": (3, torch.float32),
}
_SHAPES = {
    "lengths": "(B,)",
    "numeric": "(B, L, F)",
    "categorical": "(B, L, C)",
    "incentives": "(B, L)",
    "outcomes": "(B, L, O)",
}
