"""States for policy optimisation: windows of the log, with the clock of the episode drawn afresh."""

from __future__ import annotations

import dataclasses

import torch

from goal.log import History, Windows


class StateSampler:
    """Draws windows of the training rows.

    A log's behaviour meets some states only early or only late in an episode; the policy will meet them at any time.
    Where the schema names a clock, each drawn window is moved to another step of the episode.

    Args:
        windows: training windows.
        clock: index of the numeric feature that is the share of the episode that has passed, or None.
        horizon: steps of an episode; needed with a clock.
        device: where the drawn windows go.
    """

    def __init__(
        self, windows: Windows, *, clock: int | None, horizon: int | None, device: torch.device | str = "cpu"
    ) -> None:
        self.windows = windows
        self.clock = clock
        self.horizon = horizon
        self.device = torch.device(device)

    def draw(self, size: int, generator: torch.Generator) -> History:
        """Draw ``size`` windows with replacement."""
        history = self.windows.batch(torch.randint(len(self.windows), (size,), generator=generator))
        return self.at_any_step(history, generator)

    def at_any_step(self, history: History, generator: torch.Generator) -> History:
        """Move windows to a random step of the episode, where there is a clock, and to the sampler's device.

        Args:
            history: on the CPU.
            generator: on the CPU.
        """
        if self.clock is not None and self.horizon is not None:
            size, numeric = len(history), history.numeric.clone()
            step = torch.randint(self.horizon, (size,), generator=generator)
            last = numeric[torch.arange(size), history.lengths - 1, self.clock]
            shift = step / self.horizon - last
            moved = (numeric[..., self.clock] + shift[:, None]).clamp(min=0)
            is_event = torch.arange(history.window) < history.lengths[:, None]
            numeric[..., self.clock] = moved.where(is_event, 0)
            history = dataclasses.replace(history, numeric=numeric)
        return history.to(self.device)
