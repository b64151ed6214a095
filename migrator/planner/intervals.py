"""When storages lie idle: the stretches of an iteration in which one could be elsewhere.

Memory is told by *stretches*: stretch ``i`` is what happens between position ``i - 1`` and position ``i``, so a
iteration of ``n`` positions has ``n + 1`` of them. A storage lies in HBM from the stretch after its birth to the one
after its last use, in which the gradient is computed with it. Pure functions on plain data.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torch_tiers.allocator.layout.lifetimes import Lifetime
from torch_tiers.allocator.sizes import format_size
from torch_tiers.migrator.model.trace import Trace

Floats = NDArray[np.float64]
Bytes = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Interval:
    """Between two accesses of a storage that follow each other.

    Attributes
    ----------
    storage : int
        Which storage lies idle.
    nbytes : int
        Its bytes.
    begin, end : int
        Positions of the two accesses: the last save or a use, and the use that follows.
    start, stop : float
        When they happen, in seconds from the iteration's begin; 0 where times were not measured.
    """

    storage: int
    nbytes: int
    begin: int
    end: int
    start: float
    stop: float

    @property
    def seconds(self) -> float:
        """How long the storage lies idle."""
        return self.stop - self.start


def inactive(trace: Trace) -> tuple[Interval, ...]:
    """Inactive intervals of every storage that has bytes, storages in the order of births, intervals in that of time.

    The first of a storage goes from its last save, when all of forward is done with it, to its first use; for
    each further use there is one more. A storage that is never used has none: nobody waits for it.
    """
    times = trace.times or (0.0,) * trace.positions
    last_save: dict[int, int] = {}
    for site in trace.sites:
        last_save[site.storage] = max(site.birth, last_save.get(site.storage, 0))
    intervals = []
    for life in trace.lifetimes:
        begin = min(last_save[life.ident], life.uses[0]) if life.uses else life.birth
        for end in life.uses:
            intervals.append(Interval(life.ident, life.nbytes, begin, end, times[begin], times[end]))
            begin = end
    return tuple(intervals)


def durations(trace: Trace) -> Floats:
    """Seconds of every stretch; zeros where times were not measured."""
    if not trace.times:
        return np.zeros(trace.positions + 1)
    return np.diff(np.array((0.0, *trace.times, trace.seconds))).clip(min=0)  # clocks of events are not exact


def room(trace: Trace, budget: int) -> Bytes:
    """Bytes that `budget` leaves for saved tensors in every stretch; negative where it does not hold the rest."""
    others = np.array(trace.others, dtype=np.int64) if trace.others else np.zeros(trace.positions + 1, dtype=np.int64)
    return budget - others


def in_hbm(life: Lifetime) -> tuple[int, int]:
    """The stretches ``[first, end)`` in which a storage that stays lies in HBM."""
    return life.birth + 1, life.death + 2


def occupancy(trace: Trace) -> Bytes:
    """Saved bytes in HBM in every stretch when everything stays."""
    changes = np.zeros(trace.positions + 2, dtype=np.int64)
    for life in trace.lifetimes:
        first, end = in_hbm(life)
        changes[first] += life.nbytes
        changes[end] -= life.nbytes
    return np.cumsum(changes)[:-1]


def where_fullest(trace: Trace, hbm: Bytes) -> str:
    """Where HBM holds most, and what lies in it there, in words; `hbm` is by stretch."""
    stretch = int(hbm.argmax())
    others = trace.others[stretch] if trace.others else 0
    before = max((site for site in trace.sites if site.birth < stretch), key=lambda site: site.birth, default=None)
    after = [site.key for site in trace.sites if stretch - 1 in site.uses]
    where = f"when backward asks for {_named(after[0])}" if after else "at the begin"
    if before and not after:
        where = f"after {_named(before.key)} was saved"
    return f"{format_size(int(hbm.max()) - others)} of saved tensors and {format_size(others)} of all else {where}"


def _named(key: str) -> str:
    return f"tensor {key[1:]} outside of all modules" if key.startswith(":") else key
