"""Figures as text of a page or as pictures, the same for the same figure."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from torch_tiers.allocator.errors import TiersError
from torch_tiers.allocator.sizes import KiB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST = 250 * KiB
"""Bytes of a figure as SVG: one that is larger is smaller as a PNG."""

_DPI = 120
_NOTHING = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_LOOK = {
    "svg.fonttype": "none",  # text stays text, in the reader's fonts
    "svg.hashsalt": "tiers",  # ids are drawn by lot otherwise
    "text.parse_math": False,  # a name with dollars in it is a name
    "path.simplify": True,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.fontsize": "small",
}


def check() -> None:
    """Raise TiersError where there is nothing to draw with."""
    if find_spec("matplotlib") is None:
        raise TiersError("figures need matplotlib: pip install 'torch-tiers[plot]'")


@contextmanager
def styled() -> Iterator[None]:
    """Draw in one style, whatever this user's matplotlibrc says; both making and writing a figure look at it."""
    from matplotlib import style

    with style.context(["default", _LOOK]):
        yield


def inline(name: str, figure: Figure) -> str:
    """Return a figure as a part of a page, whose ids begin with its name."""
    file = svg(figure)
    if len(file) > MOST:
        picture = base64.b64encode(png(figure)).decode("ascii")
        return f'<img alt="" src="data:image/png;base64,{picture}">'
    # Figures on one page have the same ids, which are to be told apart.
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", file[file.index("<svg") :].rstrip())


def svg(figure: Figure) -> str:
    """Return a figure as an SVG file."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata=_NOTHING)
    return file.getvalue()


def png(figure: Figure) -> bytes:
    """Return a figure as a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=_DPI, metadata={"Software": None})
    return file.getvalue()
