"""What the figures have in common: size, colours, units, bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_tiers.allocator.sizes import GiB, MiB
from torch_tiers.planning.html.thin import Spans, merged

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 10.0  # inches
FINEST = 1000  # bars side by side: a figure is about as many pixels wide

COLOURS = {
    "hbm": "#3b6fb6",
    "dram": "#e0973c",
    "nvme": "#7d5ba6",
    "other": "#b8bcc2",
    "moving": "#8dbce8",
    "recomputed": "#6aa56a",
    "stall": "#c0392b",
    "waiting": "#5b626b",
    "budget": "#c0392b",
    "plan": "#2d7d46",
}


def blank(height: float) -> Figure:
    """Return a figure of that height in inches, as wide as the page."""
    from matplotlib.figure import Figure  # the object, not pyplot, which would look for a display

    return Figure(figsize=(WIDTH, height), layout="constrained")


def unit_of(most: float) -> tuple[int, str]:
    """Return the unit to tell bytes in, and its name."""
    return (GiB, "GiB") if most >= GiB else (MiB, "MiB")


def bars(axes: Axes, row: float, spans: Spans, longest: float, **look: Any) -> None:
    """Draw spans as bars in a row of a chart that is `longest` wide; a short bar is drawn wide enough to be seen."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    drawn = merged(spans, longest / FINEST)
    if not drawn:
        return
    low, high = row - 0.4, row + 0.4
    corners = np.array([[(begin, low), (end, low), (end, high), (begin, high)] for begin, end in drawn])
    # One path for all of them: an element for each would be most of the file.
    axes.add_patch(PathPatch(Path.make_compound_path_from_polys(corners), linewidth=0, **look))


def key(axes: Axes, colours: Sequence[tuple[str, str]]) -> None:
    """Add a legend of names and colours above the chart."""
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=name) for name, colour in colours]
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(handles), frameon=False)
