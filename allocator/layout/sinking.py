"""Which state lies in DRAM: what an optimizer touches once a step sinks before anything a matrix product reads.

Pure functions. Streamed once a step over the link, state costs its bytes over the link's bandwidth; an
operand of a matrix product that lies on host pages is read many times over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SPARE = 0.02  # of the budget: stays free when state rises, so that it does not sink again at once


@dataclass(frozen=True, slots=True)
class State:
    """One block of state: its address, its bytes, and how many of them lie in DRAM."""

    address: int
    nbytes: int
    sunk: int


def sink_or_rise(
    state: Sequence[State], *, short: int, spare: int, budget: int, page: int = 0
) -> tuple[list[int], list[int]]:
    """Blocks that sink to DRAM and blocks that rise to HBM between two periods.

    Parameters
    ----------
    state : sequence of State
        All blocks of state.
    short : int
        Bytes of DRAM that all but state had in the last period.
    spare : int
        Bytes of HBM that nothing was on in the last period.
    budget : int
        HBM budget, in bytes.
    page : int
        Bytes of a page, of which a block may have parts at both ends: with them others move.

    Returns
    -------
    sink, rise : list of int
        Addresses, at least one of the two empty.
    """
    if short > 0:
        sink = []
        for block in sorted(state, key=lambda block: -block.nbytes):
            if short > 0 and block.sunk < block.nbytes:
                sink.append(block.address)
                short -= block.nbytes - block.sunk
        return sink, []
    rise = []
    spare -= int(SPARE * budget)
    for block in sorted(state, key=lambda block: block.nbytes):
        if block.sunk and block.nbytes + 2 * page <= spare:
            rise.append(block.address)
            spare -= block.nbytes + 2 * page
    return [], rise
