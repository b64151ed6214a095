"""A section of the page: sentences, and a figure where the run has data for one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # an extra, which is imported only where something is drawn
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Section:
    """A section.

    Attributes
    ----------
    name : str
        Its anchor on the page, and the name of its picture's file.
    title : str
        Its heading.
    text : tuple of str
        How to read the figure, or why there is none.
    figure : Figure or None
        The figure; None where the run has no data for it.
    """

    name: str
    title: str
    text: tuple[str, ...]
    figure: Figure | None = None
