"""The look of every plot, and how a figure becomes a PNG file or an SVG that follows the page's light or dark theme.

Figures are made through matplotlib's object interface: no pyplot, so no global list of figures and no display.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

# Each colour has a job and is replaced in the SVG by the page's variable of that name, so all must differ.
INK = "#1f2430"
MUTED = "#6a7180"
GRID = "#e4e6eb"
SURFACE = "#fffffe"
POLICY = "#2f6fd0"
ORACLE = "#5f6675"
REFERENCE = "#b7791f"
BEHAVIOUR = "#0f8a6f"
TARGET = "#c2414b"
VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--line",
    SURFACE: "--surface",
    POLICY: "--policy",
    ORACLE: "--oracle",
    REFERENCE: "--reference",
    BEHAVIOUR: "--behaviour",
    TARGET: "--target",
}
TEXT_SIZE = 8.5
# Inches, in proportion to the page's half and full columns, so that text has one size in both.
HALF, WIDE = 4.7, 10.1
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


def new_figure(
    width: float = HALF, height: float = 2.9, *, rows: int = 1, columns: int = 1
) -> tuple[Figure, list[Axes]]:
    """An empty figure in the house look, `width` by `height` inches, and its axes in reading order."""
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="none")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(rows, columns, index + 1) for index in range(rows * columns)]
    for axis in axes:
        style(axis)
    return figure, axes


def style(axis: Axes) -> None:
    """Recessive axes: two thin spines, a light horizontal grid, muted labels."""
    axis.set_facecolor("none")
    for side, spine in axis.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set(color=GRID, linewidth=0.8)
    axis.tick_params(colors=MUTED, labelsize=TEXT_SIZE - 0.5, length=0, pad=5)
    axis.grid(axis="y", color=GRID, linewidth=0.7)
    axis.set_axisbelow(True)
    for label in (axis.xaxis.label, axis.yaxis.label):
        label.set(color=MUTED, fontsize=TEXT_SIZE)
    axis.title.set(color=INK, fontsize=TEXT_SIZE + 0.5)


def end_label(
    axis: Axes,
    x: float,
    y: float,
    text: str,
    color: str,
    *,
    offset: tuple[float, float] = (6, 0),
    align: Literal["left", "right"] | None = None,
) -> None:
    """A direct label beside a point, instead of a legend; it leans away from the point unless `align` says how."""
    axis.annotate(
        text,
        (x, y),
        xytext=offset,
        textcoords="offset points",
        ha=align or ("left" if offset[0] >= 0 else "right"),
        va="center" if offset[1] == 0 else ("bottom" if offset[1] > 0 else "top"),
        color=color,
        fontsize=TEXT_SIZE,
        annotation_clip=False,
    )


def legend(axis: Axes, **options) -> None:
    """A frameless legend in muted text."""
    axis.legend(frameon=False, fontsize=TEXT_SIZE, labelcolor=MUTED, handlelength=1.8, borderaxespad=0.2, **options)


def heat_map(
    axis: Axes, share: Sequence[Sequence[float]], columns: Sequence[str], rows: Sequence[str], *, numbers: bool
) -> None:
    """Cells of one hue whose strength is the share, `share[row][column]`; row 0 is at the bottom.

    Strength is opacity, so the same drawing works on a light and on a dark page.
    """
    top = max((value for row in share for value in row), default=0.0) or 1.0
    for i, row in enumerate(share):
        for j, value in enumerate(row):
            strength = value / top
            axis.add_patch(
                Rectangle((j - 0.47, i - 0.45), 0.94, 0.9, facecolor=POLICY, alpha=0.04 + 0.9 * strength, lw=0)
            )
            if numbers and value >= 0.02:
                color = SURFACE if strength > 0.75 else INK
                axis.text(j, i, f"{100 * value:.0f}", ha="center", va="center", color=color, fontsize=TEXT_SIZE - 1)
    axis.set(xlim=(-0.5, len(columns) - 0.5), ylim=(-0.5, len(rows) - 0.5))
    axis.set_xticks(range(len(columns)), columns)
    axis.set_yticks(range(len(rows)), rows)
    axis.grid(False)
    for spine in axis.spines.values():
        spine.set_visible(False)


def padded(values: Sequence[float], *, floor: float | None = None, share: float = 0.06) -> tuple[float, float]:
    """Limits around finite values with some air; `floor` is a value to include."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    finite = [*finite, floor] if floor is not None else finite
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    air = share * (high - low or abs(high) or 1.0)
    return (low if floor is not None and low == floor else low - air), high + air


def save_png(figure: Figure, path: Path) -> None:
    """Writes the figure on white at 160 dots per inch."""
    figure.savefig(path, format="png", dpi=160, facecolor="white")
    # The layout has been found; the SVG need not find it again.
    figure.set_layout_engine("none")


def to_svg(figure: Figure, name: str, description: str) -> str:
    """The figure as an `<svg>` element whose colours are the page's variables and whose text uses the page's font.

    Args:
        figure: The figure.
        name: Prefix of all ids, which must differ between the figures of a page.
        description: What a screen reader says.
    """
    buffer = io.StringIO()
    # Restores the user's settings afterwards.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "goal"}):
        FigureCanvasSVG(figure).print_svg(buffer, metadata=_NO_METADATA)
    FigureCanvasAgg(figure)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\1{name}-", svg)
    # A fixed size would not shrink with the page; the view box keeps the proportions.
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    escaped = description.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{escaped}"', 1)
    for color, variable in VARIABLES.items():
        svg = svg.replace(color, f"var({variable})")
    return re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
