"""Cuts an evaluation off a period's log, where HBM cannot hold the evaluation at all.

An evaluation comes after the last optimizer's step and before the next forward. Laid out with the training step, one
that is larger than HBM would put a part of the region into DRAM, for training, too.
"""

from __future__ import annotations

from typing import NamedTuple

from torch_tiers.allocator.layout.sequence import Log
from torch_tiers.allocator.native import DRAM, USED, Core


class AtStep(NamedTuple):
    """Counts at an optimizer's step.

    Attributes
    ----------
    requests : int
        Of the period.
    mispredicted : int
        Departures since the core was opened.
    dram, spilled : int
        Bytes of DRAM; and the most in the period for which there was no room in HBM.
    """

    requests: int
    mispredicted: int
    dram: int
    spilled: int


class Evaluations:
    """Finds evaluations in the periods of one GPU."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._at_step: AtStep | None = None  # when the last optimizer had stepped
        self._last: Log | None = None  # the last period's log without what was cut off; None if it was not cut
        self._before: Log | None = None  # the same of the one before
        self._late = False  # whether the last period told of more after its steps than in them

    def step_over(self) -> None:
        """An optimizer has stepped. If it is the period's last, the requests until its end may be an evaluation's."""
        now = self._core.glance()
        self._at_step = AtStep(now.requests, now.mispredicted, now.dram, now.spilled_so_far)

    def needed(self, dram: int, spilled: int) -> int:
        """Bytes of `spilled` that training had no room for; ask before `period_over`.

        After the period's steps an evaluation may take pages of the layout's region, which the next step maps again. So
        what grew after the steps, without more DRAM, does not count, unless it did so in the period before, too.
        """
        at_step = self._at_step
        late = at_step is not None and dram <= at_step.dram and spilled > at_step.spilled
        is_evaluation, self._late = late and not self._late, late
        return at_step.spilled if at_step is not None and is_evaluation else spilled

    def period_over(self, dram: int, *, may_be: bool) -> AtStep | None:
        """The period has ended, with `dram` bytes of DRAM mapped: cut off what came after its steps, if it has to be.

        Parameters
        ----------
        may_be : bool
            Whether it can be an evaluation: no other thread trains, and plans do not change.

        Returns
        -------
        AtStep or None
            What was counted up to the cut; None if the period is not cut.
        """
        at_step, self._at_step = self._at_step, None
        before, self._before, self._last = self._last, self._last, None
        # Two periods in a row that end so are like that: what comes after their steps is theirs.
        if not may_be or at_step is None or before is not None or dram <= at_step.dram:
            return None
        log = Log(*self._core.log(0))
        cut = log.until(at_step.requests)
        # A log that is too long to be laid out has no requests.
        if len(log.requests) and log.most_alive() <= max(_room(self._core), cut.most_alive()):
            return None
        self._last = cut
        return at_step

    def forget_step(self) -> None:
        """A period has ended that is not cut, nor was the one before, and for which HBM had room."""
        self._at_step, self._late = None, False

    @property
    def has_cut(self) -> bool:
        """Whether the last period or the one before was cut: then `logs` differ from the core's own."""
        return self._last is not None or self._before is not None

    def logs(self) -> tuple[Log, Log]:
        """The logs of the last period and of the one before, without what was cut off."""
        return self._last or Log(*self._core.log(0)), self._before or Log(*self._core.log(1))


def _room(core: Core) -> int:
    """Bytes of HBM that are left beside what is alive between two periods."""
    counts, blocks = core.counts(), core.blocks()
    alive = blocks[blocks["kind"] == USED]
    in_dram = sum(core.on(int(address), DRAM) for address in alive["address"])
    return counts.hbm_limit - (counts.allocated - in_dram)
