"""What comes after the steps of a period and is none of it, such as an evaluation: where HBM cannot hold it at all.

Laid out with the rest it would have a part of the region lie in DRAM from then on, for training, too.
"""

from __future__ import annotations

from typing import NamedTuple

from allocator.native import DRAM, USED, Core
from allocator.sequence import Log


class _AtStep(NamedTuple):
    """What there was when an optimizer had stepped: requests of the period, departures so far, bytes of DRAM."""

    requests: int
    departed: int
    dram: int


class Evaluations:
    """Tells them from the periods of all GPUs."""

    def __init__(self) -> None:
        self._at_step: dict[int, _AtStep] = {}  # when the last optimizer had stepped
        self._last: dict[int, Log] = {}  # of the last period, where it was cut, what is left
        self._before: dict[int, Log] = {}  # the same of the one before

    def step_over(self, device: int, core: Core) -> None:
        """An optimizer has stepped: if it was the last, what comes until the period is over may be an evaluation's."""
        now = core.glance()
        self._at_step[device] = _AtStep(now.requests, now.departed, now.dram)

    def period_over(self, device: int, core: Core, dram: int, *, may_be: bool) -> int | None:
        """The period ends, with `dram` bytes of DRAM mapped; whether it is cut where its steps were over.

        Parameters
        ----------
        may_be : bool
            Whether what came after these steps was not another thread's, nor may be asked for by other plans.

        Returns
        -------
        int or None
            Departures, since the core was opened, until these were over; None if it is not cut.
        """
        before, at_step = self._last.pop(device, None), self._at_step.pop(device, None)
        self._before.pop(device, None)
        if before is not None:
            self._before[device] = before
        # Two periods in a row that end so are like that: what comes after their steps is theirs.
        if not may_be or at_step is None or before is not None or dram <= at_step.dram:
            return None
        log = Log(*core.log(0))
        cut = log.until(at_step.requests)
        # A log that is too long to be laid out has no requests.
        if len(log.requests) and log.most_alive() <= max(_room(core), cut.most_alive()):
            return None
        self._last[device] = cut
        return at_step.departed

    def has_cut(self, device: int) -> bool:
        """Whether the last period or the one before it was cut: then the core's own logs are not theirs."""
        return device in self._last or device in self._before

    def logs(self, device: int, core: Core) -> tuple[Log, Log]:
        """The last period's log and that of the one before, without what was cut."""
        last, before = self._last.get(device), self._before.get(device)
        return last or Log(*core.log(0)), before or Log(*core.log(1))


def _room(core: Core) -> int:
    """Bytes of HBM that are left beside what is alive between two periods."""
    counts, blocks = core.counts(), core.blocks()
    alive = blocks[blocks["kind"] == USED]
    in_dram = sum(core.on(int(address), DRAM) for address in alive["address"])
    return counts.hbm_limit - (counts.allocated - in_dram)
