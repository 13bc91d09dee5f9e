"""States for policy optimisation: windows of the log, and variations of them that a new policy will meet."""

from __future__ import annotations

import torch

from goal.log import History, Windows


class StateSampler:
    """Draws windows of the training rows.

    The log shows states behind the histories that its own behaviour made; the policy will come to them by others, and
    the reward model judges those as well. So a share of the drawn windows is varied: cut to fewer events, and joined to
    the past of another window. Where the schema names a clock, every window is moved to another step of the episode: a
    log's behaviour meets some states only early or only late, the policy at any time.

    Args:
        windows: training windows.
        clock: index of the numeric feature that is the share of the episode that has passed, or None.
        horizon: steps of an episode; needed with a clock.
        varied: share of the windows that is cut, and share that gets another past.
        device: where the drawn windows go.
    """

    def __init__(
        self,
        windows: Windows,
        *,
        clock: int | None,
        horizon: int | None,
        varied: float = 0.0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.windows = windows
        self.clock = clock
        self.horizon = horizon
        self.varied = varied
        self.device = torch.device(device)

    def draw(self, size: int, generator: torch.Generator) -> History:
        """Draw ``size`` windows with replacement."""
        history = self.windows.batch(torch.randint(len(self.windows), (size,), generator=generator))
        if self.varied:
            history = self._splice(self._cut(history, generator), generator)
        if self.clock is not None and self.horizon is not None:
            self._move(history, self.clock, torch.randint(self.horizon, (size,), generator=generator) / self.horizon)
        return history.to(self.device)

    def _cut(self, history: History, generator: torch.Generator) -> History:
        """Drop the oldest events of some windows, so that nothing hangs on how long a history is."""
        size, window = history.incentives.shape
        drawn = 1 + (torch.rand(size, generator=generator) * history.lengths).long()
        chosen = torch.rand(size, generator=generator) < self.varied
        lengths = torch.where(chosen, torch.minimum(drawn, history.lengths), history.lengths)
        place = torch.arange(window)
        source = ((history.lengths - lengths)[:, None] + place).clamp(max=window - 1)
        inside = place < lengths[:, None]
        rows = torch.arange(size)[:, None]

        def shift(values: torch.Tensor) -> torch.Tensor:
            moved = values[rows, source]
            return moved.masked_fill(~inside.view(*inside.shape, *(1,) * (values.ndim - 2)), 0)

        return History(
            shift(history.numeric),
            shift(history.categorical),
            shift(history.incentives),
            shift(history.outcomes),
            lengths,
        )

    def _splice(self, history: History, generator: torch.Generator) -> History:
        """Give some states the past of another window, so that nothing hangs on which past led to them in the log."""
        size = len(history)
        rows = torch.arange(size)
        chosen = torch.rand(size, generator=generator) < self.varied
        donors = torch.where(chosen, torch.randperm(size, generator=generator), rows)
        spliced = history.select(donors)
        last, own = spliced.lengths - 1, history.lengths - 1
        spliced.numeric[rows, last] = history.numeric[rows, own]
        spliced.categorical[rows, last] = history.categorical[rows, own]
        return spliced

    @staticmethod
    def _move(history: History, clock: int, share: torch.Tensor) -> None:
        last = history.numeric[torch.arange(len(history)), history.lengths - 1, clock]
        history.numeric[..., clock] = (history.numeric[..., clock] + (share - last)[:, None]).clamp(min=0)
