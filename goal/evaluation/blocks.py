"""The parts a report's page is made of; the template says how each looks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from matplotlib.figure import Figure

from goal.evaluation.tables import Table


@dataclass(frozen=True, eq=False)
class Plot:
    """A figure, the name of its PNG file, and what a reader should see in it."""

    name: str
    figure: Figure
    caption: str
    wide: bool = False
    kind: str = field(default="plot", init=False)


@dataclass(frozen=True)
class Facts:
    """Labelled values."""

    pairs: Sequence[tuple[str, str]]
    kind: str = field(default="facts", init=False)


@dataclass(frozen=True)
class Note:
    """A sentence that stands out; a warning stands out more."""

    text: str
    warning: bool = False
    kind: str = field(default="note", init=False)


Block = Plot | Table | Facts | Note


@dataclass(frozen=True)
class Section:
    """A titled part of the page."""

    key: str
    title: str
    lead: str
    blocks: Sequence[Block]
    folded: bool = False
