"""Which state and weights are demoted to DRAM, and which are promoted back to HBM, between two steps.

Pure functions. The optimizer's state goes to DRAM before anything else: it is read once a step, which costs its bytes
over the link's bandwidth. Weights that are streamed cross the link with every forward and backward. Any other operand
of a matrix product that lies in DRAM would cross it many times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

SPARE = 0.02  # of the budget: stays free when state is promoted, so that it is not demoted again at once


@dataclass(frozen=True, slots=True)
class Resident:
    """One block of state, or a weight: its address, its bytes, and how many of them lie in DRAM."""

    address: int
    nbytes: int
    in_dram: int
    is_weight: bool = False


def demote_or_promote(
    residents: Sequence[Resident], *, short: int, spare: int, budget: int, page: int = 0
) -> tuple[list[int], list[int]]:
    """Blocks to demote to DRAM, or blocks to promote to HBM, the smallest first.

    The smallest block of state that makes room enough is demoted. Where none does, the largest is, and then more. State
    is demoted before weights, and promoted after them. Weights are chosen evenly over the model.

    Parameters
    ----------
    residents : sequence of Resident
        All state, and the weights that may be streamed, in the order of the model.
    short : int
        Bytes for which the last period had no room in HBM: so many of these have to make room.
    spare : int
        Bytes of HBM that nothing was mapped on in the last period.
    budget : int
        HBM budget, in bytes.
    page : int
        Bytes of a page. A block may have parts of pages at both ends, which move as a whole.

    Returns
    -------
    demote, promote : list of int
        Addresses; at least one list is empty.
    """
    weights = [block for block in residents if block.is_weight]
    state = sorted((block for block in residents if not block.is_weight), key=attrgetter("nbytes"))
    if short > 0:
        demote = []
        left = sorted((block.nbytes - block.in_dram, block.address) for block in state if block.in_dram < block.nbytes)
        while short > 0 and left:
            enough = (place for place, (in_hbm, _) in enumerate(left) if in_hbm >= short)
            freed, address = left.pop(next(enough, -1))
            demote.append(address)
            short -= freed
        in_hbm = [block for block in weights if block.in_dram < block.nbytes]
        chosen = evenly([block.nbytes - block.in_dram for block in in_hbm], short)
        return [*demote, *(in_hbm[place].address for place in chosen)], []
    promote = []
    spare -= int(SPARE * budget)
    in_dram = [block for block in weights if block.in_dram and block.nbytes + 2 * page <= spare]
    places = evenly([block.nbytes + 2 * page for block in in_dram], spare)
    for block in [*(in_dram[place] for place in places), *(block for block in state if block.in_dram)]:
        if block.nbytes + 2 * page <= spare:
            promote.append(block.address)
            spare -= block.nbytes + 2 * page
    return [], promote


def evenly(sizes: Sequence[int], nbytes: int) -> list[int]:
    """Places spread evenly over `sizes`, ascending, whose sum reaches `nbytes` and exceeds it by less than one size."""
    total, taken, passed = sum(sizes), 0, 0
    places = []
    for place, size in enumerate(sizes):
        passed += size
        if taken * total < passed * min(nbytes, total):
            places.append(place)
            taken += size
    return places
