"""Which state and weights are demoted to DRAM, and which are promoted back to HBM, between two steps.

Pure functions. The optimizer's state goes to DRAM before anything else: it is read once a step, which costs its bytes
over the link's bandwidth. Weights that are streamed cross the link with every forward and backward. Any other operand
of a matrix product that lies in DRAM would cross it many times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    """Blocks to demote to DRAM, the largest first, or blocks to promote to HBM, the smallest first.

    State is demoted before weights, and promoted after them.

    Parameters
    ----------
    residents : sequence of Resident
        All state, and the weights that may be streamed.
    short : int
        Bytes of DRAM that other blocks took in the last period: so many of these have to make room.
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
    if short > 0:
        demote = []
        for block in sorted(residents, key=lambda block: (block.is_weight, -block.nbytes)):
            if short > 0 and block.in_dram < block.nbytes:
                demote.append(block.address)
                short -= block.nbytes - block.in_dram
        return demote, []
    promote = []
    spare -= int(SPARE * budget)
    for block in sorted(residents, key=lambda block: (not block.is_weight, block.nbytes)):
        if block.in_dram and block.nbytes + 2 * page <= spare:
            promote.append(block.address)
            spare -= block.nbytes + 2 * page
    return [], promote
