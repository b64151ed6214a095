"""What the allocator does on one GPU between two steps.

It sets the next step's layout where the last one did not come as predicted, has state and weights change their tier,
and unmaps what is not needed any more. A *period* of the allocator is a step of the program.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from torch_tiers.allocator.host.claims import DramClaims
from torch_tiers.allocator.layout.evaluations import Evaluations
from torch_tiers.allocator.layout.kinds import Kinds
from torch_tiers.allocator.layout.residence import Residence
from torch_tiers.allocator.layout.sequence import TOLERATED_SHARE, Largest, LayoutDecision, Log, Watch, predict, repeats
from torch_tiers.allocator.native import HBM, Core, CoreBusy, CoreError, CoreFull, Glance
from torch_tiers.allocator.native.sequence_layout import SequenceLayout
from torch_tiers.allocator.sizes import GiB, format_size, round_up

log = logging.getLogger("tiers")

MORE = 1.03  # times what is alive at once, as packing adds up to 3%
ENDS = 8  # pages at the ends of heaps that are used in part, at most


@dataclass(slots=True)
class _Calm:
    """A run of periods that each repeated the one before, and after which there was nothing to do."""

    mispredicted: int  # unpredicted requests in each period
    periods: int = 0  # of them that `Watch` and `Kinds` have not counted yet


class Periods:
    """What the allocator does between the periods of one GPU.

    Parameters
    ----------
    device : int
        Number of the GPU.
    core : Core
        Its pages and blocks.
    claims : DramClaims
        Where DRAM is claimed before it is taken.

    Attributes
    ----------
    residence : Residence
        Which state and weights lie in DRAM.
    came_as_laid_out : bool
        Whether there was a layout in the last period, and next to all requests were as predicted by it.
    """

    def __init__(self, device: int, core: Core, claims: DramClaims) -> None:
        self.core = core
        self.residence = Residence(device, core, claims)
        self.came_as_laid_out = False
        self._device = device
        self._claims = claims
        self._watch = Watch()
        self._kinds = Kinds()
        self._largest: Largest | None = Largest()  # None: HBM does not hold the largest of all requests together
        self._in_dram = 0  # bytes, when it was last tried to have fewer there
        self._evaluations = Evaluations(core)
        self._mispredicted = 0  # unpredicted requests, until the last period ended
        self._calm: _Calm | None = None
        self._refused = False  # whether it was logged that there is no layout
        self._new_plans: int | None = None  # if plans change with the next period: its expected peak
        self._lent = 0  # bytes of HBM beyond the budget
        self._withheld = 0  # bytes of the budget
        self._has_no_layout = False  # in this period: the first after plans changed

    def lend(self, nbytes: int) -> None:
        """Raise the limit by `nbytes` beyond the budget, in whole pages; 0 restores it."""
        nbytes -= nbytes % self.core.page_bytes  # as the core rounds limits down: else each loan would cost a page
        if nbytes != self._lent:
            self.core.limit(HBM, self.core.counts().hbm_limit - self._lent + nbytes)
            self._lent = nbytes

    def withhold(self, nbytes: int) -> None:
        """Lower the limit by `nbytes`, in whole pages, for what is not allocated here; 0 restores it."""
        nbytes = round_up(nbytes, self.core.page_bytes)
        self.core.limit(HBM, self.core.counts().hbm_limit + self._withheld - nbytes)
        self._withheld = nbytes

    def begin(self) -> None:
        """The first period begins: requests before it belong to none."""
        self.core.mark()

    def step_over(self) -> None:
        """An optimizer has stepped. If it is the period's last, the requests until its end may be an evaluation's."""
        self._evaluations.step_over()

    def tidy(self) -> None:
        """Unmap what was mapped beside the layout for requests off the sequence, which have been freed by now.

        In a period without a layout, everything idle is unmapped.
        """
        self._trim(self.core.trim if self._has_no_layout else self.core.trim_outside)

    def expect_new_plans(self, peak: int, *, now: bool) -> None:
        """Plans change with the next period; see `PageAllocator.expect_new_plans`. From any thread."""
        self._new_plans = peak
        self.residence.forget()
        if now:
            self._trim(partial(self.core.trim, peak))

    def period_over(self, *, alone: bool, planning: bool = False) -> None:
        """A period has ended: set the next one's layout, if this one's sequence of requests was new.

        The device is idle meanwhile, so this has to be quick. Most periods repeat the one before, after which nothing
        had to be done: to see that takes microseconds, where a whole look takes 0.1 ms. Another thread may have changed
        anything, so the core is asked each time.

        Parameters
        ----------
        alone : bool
            No other thread runs a model. If one does, neither state nor weights move: that thread may launch kernels
            that read them at any time, and while they move they are mapped nowhere.
        planning : bool
            Plans are being made. The program may need less under them, so no state is demoted, unless weights are
            streamed.
        """
        now = self.core.mark()
        before, self._mispredicted = self._mispredicted, now.mispredicted
        since, calm = now.mispredicted - before, self._calm
        self.came_as_laid_out = now.came > 0 and since <= TOLERATED_SHARE * now.came
        fits = not (now.dram or now.spilled or self._claims.granted(self._device))
        repeated = now.repeated and fits and self._new_plans is None
        if calm is not None and repeated and since == calm.mispredicted:
            calm.periods += 1
            self._evaluations.forget_step()
            return
        if calm is not None:
            self._watch.repeated_often(calm.periods)
            self._kinds.repeated_often(calm.periods)
            self._calm = None
        nothing_done = self._look(now, before, alone, planning)
        if nothing_done and repeated and not self._evaluations.has_cut and not self._kinds.may_return:
            self._calm = _Calm(since)

    def _look(self, now: Glance, mispredicted_before: int, alone: bool, planning: bool) -> bool:
        """Do what is to be done after a period; True if that was nothing, and the log was not needed to see it."""
        core, watch, kinds = self.core, self._watch, self._kinds
        mispredicted, dram = now.mispredicted, now.dram
        spilled = self._evaluations.needed(dram, now.spilled) if alone else now.spilled
        new_plans = self._new_plans  # read once: what another thread sets from here on is for the period after
        cut = self._evaluations.period_over(dram, may_be=alone and new_plans is None)
        if cut is not None:
            self._lay_out_again()
            mispredicted, dram, spilled = cut.mispredicted, core.glance().dram, cut.spilled
        since = mispredicted - mispredicted_before
        self._claims.period_over(self._device, core, dram)
        if alone and self.residence.is_due(dram, spilled):
            self._trim(core.trim_outside)  # state that is promoted needs the room of what lies idle beside the layout
        demoted = self.residence.period_over(spilled, alone=alone, planning=planning)
        self._has_no_layout = new_plans is not None
        if new_plans is not None:
            self._new_plans = None
            core.forget_layout(new_plans)
            self._trim(partial(core.trim, new_plans))  # gradients, too, are freed by now
            watch.expect_new_plans()
            kinds.forget()
            self._largest = Largest()
            return False
        repeated = bool(now.repeated) and not self._evaluations.has_cut
        forgot = None if demoted else _forgot_after(now, since, watch, kinds, repeated=repeated)
        if forgot is not None:
            anew = forgot or (dram > 0 and self._has_room_now())
            if anew:
                self._set_layout(kinds.layouts())
            return not anew
        last, before = self._evaluations.logs()
        sizes = last.requests["bytes"].astype(np.int64)
        largest = self._largest
        differs = largest is not None and largest.period_over(last, before, self._room()) and kinds.are_many
        decision = watch.period_over(sizes, since, repeated=repeats(last, before), differs_in_sizes=differs)
        forgot = kinds.period_over(last)
        told = "cuda:%d: %d of %d requests were not as laid out, %s had no room in hbm: %s the layout"
        log.debug(told, self._device, since, len(sizes), format_size(spilled), decision.name.lower())
        if decision is LayoutDecision.FORGET:
            kinds.forget()
            core.forget_layout(core.counts().hbm_limit)  # and grow as far as that is
        elif demoted or decision is LayoutDecision.RENEW:
            self._lay_out(last, before, largest if differs else None)
        elif forgot:
            self._set_layout(kinds.layouts())
        return False

    # ----------------------------------------------------------------------------------- layouts

    def _lay_out(self, last: Log, before: Log, largest: Largest | None) -> None:
        """Lay out what is predicted from the last period, or from the `largest` of those that differ in sizes alone."""
        room = self._room()
        predicted = predict(last, before, room, largest)
        if largest is not None and predicted is not None and predicted.total > MORE * largest.most_alive:
            # No period has all that together: as of experts, of which now one and now another has more to do.
            self._largest = largest = None
            predicted = predict(last, before, room)
        if predicted is not None:
            self._kinds.learn(last, predicted, largest)
            self._set_layout(self._kinds.layouts())

    def _room(self) -> int:
        """Bytes of HBM for the region: what is in use now lives on, and heaps end with pages that are used in part."""
        counts = self.core.counts()
        return max(0, counts.hbm_limit - (counts.allocated - counts.demoted) - ENDS * self.core.page_bytes)

    def _has_room_now(self) -> bool:
        """Whether HBM has room by now for some of the layout's pages in DRAM, where kernels are slow; asked once."""
        counts = self.core.counts()
        in_dram = counts.dram - counts.demoted
        if in_dram == self._in_dram or self._room() - (self._kinds.total - in_dram) < self.core.page_bytes:
            return False
        self._in_dram = in_dram
        return True

    def _lay_out_again(self) -> None:
        """Unmap what an evaluation left idle in DRAM, which other processes may need, and begin the layout anew."""
        layouts = self._kinds.layouts()
        if layouts:
            self._set_layout(layouts)
            self._claims.trimmed(self._device, self.core)
        else:
            self._trim(self.core.trim)

    def _set_layout(self, layouts: list[SequenceLayout]) -> None:
        while layouts:
            try:
                self.core.set_layout(*layouts)
            except CoreBusy:
                self._watch = Watch()  # which is to look anew once the graph is captured
            except CoreFull as full:
                if self._more():  # for the part of the region that does not fit into HBM
                    continue
                layouts = layouts[: len(layouts) > 1]  # the last kind alone may need less than all of them
                if layouts:
                    continue
                self._do_without(full)
            except CoreError as error:
                self._do_without(error)
            else:
                self._refused = False
            return

    def _do_without(self, error: CoreError) -> None:
        """Go on without a layout for now: what is in the way, such as an evaluation's memory, may be freed later."""
        self._watch.refused()
        if not self._refused:
            self._refused = True
            log.warning("no layout for now (%s): blocks go where they fit best", error)

    def _trim(self, trim: Callable[[], None]) -> None:
        try:
            trim()
        except CoreBusy:
            pass  # a graph is captured, which may use it
        except CoreError:
            log.exception("what lies idle on cuda:%d stays mapped", self._device)
        self._claims.trimmed(self._device, self.core)

    def _more(self) -> bool:
        """Claim more DRAM; whether there was some.

        The program is not out of memory without it: between two periods, all that the next one needs lies idle.
        """
        return self._claims.more(self._device, self.core, GiB)


def _forgot_after(now: Glance, mispredicted: int, watch: Watch, kinds: Kinds, *, repeated: bool) -> bool | None:
    """Count a period without reading its log; see `Kinds.period_over`. None if the log has to be read.

    To read the log of thousands of requests takes half a millisecond, in which the device is idle.
    """
    if not mispredicted and kinds.is_whole(now.present, now.came) and watch.nothing_mispredicted():
        return kinds.came_as_laid_out(now.present)
    if repeated and watch.repeated(mispredicted):
        return kinds.came_as_before()
    return None
