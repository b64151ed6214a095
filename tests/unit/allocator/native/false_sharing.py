"""Page-level false sharing: memory that stays in use only because a block shares its page with one that lives longer.

A figure of Sentinel's (HPCA'21), in a form that no layout makes zero by construction. Pure functions.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torch_tiers.allocator.layout.packing import Ints
from torch_tiers.allocator.sizes import PAGE


def false_sharing_share(
    places: Ints, sizes: Ints, births: npt.NDArray[np.float64], deaths: npt.NDArray[np.float64], page: int = PAGE
) -> float:
    """Fraction of the byte-seconds of pages in use that no live block was on.

    A page is in use while any block on it is alive. The rest of the page is wasted for that time: a block there died
    before its neighbour, or none fills it.

    Parameters
    ----------
    places, sizes : array of int64, shape (blocks,)
        Begin and bytes of each block.
    births, deaths : array of float, shape (blocks,)
        When each was allocated and freed, in seconds.

    Returns
    -------
    float
        Between 0 and 1.
    """
    alive = float(np.sum(sizes * (deaths - births)))
    first, last = places // page, (places + sizes - 1) // page
    spans: dict[int, list[tuple[float, float]]] = {}
    whole = 0.0
    for begin, end, birth, death in zip(first, last, births, deaths, strict=True):
        for number in range(int(begin), int(end) + 1):
            spans.setdefault(number, []).append((float(birth), float(death)))
    for lives in spans.values():
        until = -np.inf
        for birth, death in sorted(lives):
            whole += max(0.0, death - max(birth, until))
            until = max(until, death)
    in_use = whole * page
    return 1 - alive / in_use if in_use else 0.0
