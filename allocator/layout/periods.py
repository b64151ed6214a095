"""What happens on one GPU between two periods: the next one's layout, and what lies on which tier."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch_tiers.allocator.host.claims import DramClaims
from torch_tiers.allocator.layout.evaluations import Evaluations
from torch_tiers.allocator.layout.kinds import Kinds
from torch_tiers.allocator.layout.sequence import Watch, foresee, repeats
from torch_tiers.allocator.layout.sinking import State, sink_or_rise
from torch_tiers.allocator.native import DRAM, HBM, STATE, USED, Core, CoreBusy, CoreError, CoreFull, Glance
from torch_tiers.allocator.native.sequence_layout import SequenceLayout
from torch_tiers.allocator.sizes import PAGE, GiB, round_up

log = logging.getLogger("tiers")

ENDS = 8  # pages of heaps that are used in part, at most
PATIENCE = 8  # periods with something in DRAM before state sinks: a migrator makes do with less by then, if it can


@dataclass(slots=True)
class _Calm:
    """A row of periods that were all as the one before them, for which nothing had to be done."""

    departed: int  # requests in each
    periods: int = 0  # that those who count periods do not know of yet


class Periods:
    """The periods of one GPU.

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
    overflow : int
        Bytes for which the last period had no room in HBM: what lay in DRAM, without the state that sank there.
    """

    def __init__(self, device: int, core: Core, claims: DramClaims) -> None:
        self.core = core
        self.overflow = 0
        self._device = device
        self._claims = claims
        self._watch = Watch()
        self._kinds = Kinds()
        self._evaluations = Evaluations(core)
        self._departed = 0  # requests, until the last period ended
        self._calm: _Calm | None = None
        self._spilled = 0  # periods in a row that had something in DRAM
        self._refused = False  # whether it was said that there is no layout
        self._news: int | None = None  # the next period's peak, if the layout is of no use to it
        self._lent = 0  # bytes of HBM beyond the budget
        self._withheld = 0  # bytes of the budget
        self._bare = False  # whether this period has no layout: the first after news

    @property
    def spilled(self) -> bool:
        """Whether something lies in DRAM, which the GPU then reads over the same link as the migrator."""
        return self._spilled > 0

    def lend(self, nbytes: int) -> None:
        """Let the program take so many bytes of HBM beyond its budget, in whole pages; 0 takes that back."""
        nbytes -= nbytes % self.core.page_bytes  # as the core rounds limits down: else each loan would cost a page
        if nbytes != self._lent:
            self.core.limit(HBM, self.core.counts().hbm_limit - self._lent + nbytes)
            self._lent = nbytes

    def withhold(self, nbytes: int) -> None:
        """Keep so many bytes of the budget, in whole pages, for what does not come from here; 0 takes that back."""
        nbytes = round_up(nbytes, self.core.page_bytes)
        self.core.limit(HBM, self.core.counts().hbm_limit + self._withheld - nbytes)
        self._withheld = nbytes

    def begin(self) -> None:
        """The first one begins: what was asked for so far was of none."""
        self.core.mark()

    def step_over(self) -> None:
        """An optimizer has stepped: if it was the last, what comes until the period is over may be an evaluation's."""
        self._evaluations.step_over()

    def tidy(self) -> None:
        """What was asked for aside has been given back: let go of what was mapped for it beside the layout.

        Where that one is of no use any more and there is no other, all that lies idle goes.
        """
        self._let_go(self.core.trim if self._bare else self.core.trim_outside)

    def expect_news(self, peak: int, *, now: bool) -> None:
        """From the next period on other tensors stay and move; see `PageAllocator.expect_news`. From any thread."""
        self._news, self._spilled = peak, 0
        if now:
            self._let_go(partial(self.core.trim, peak))

    def period_over(self, *, alone: bool) -> None:
        """One ends: where its sequence of requests is new, plan the next one's layout after it.

        The device has nothing to do meanwhile, and most periods of most programs are as the one before, after which
        nothing was done. To find that out takes microseconds, where a whole look took 0.1 ms with caches as cold as
        they are then. Anything may have changed by another thread's doing, so it is asked for here, not remembered.

        Parameters
        ----------
        alone : bool
            No other thread trains. One that does may launch kernels on state that is mapped nowhere while it moves: no
            wait for the device helps against what it launches after that.
        """
        now = self.core.mark()
        before, self._departed = self._departed, now.departed
        since, calm = now.departed - before, self._calm
        repeated = now.repeated and not now.dram and not self._claims.granted(self._device) and self._news is None
        if calm is not None and repeated and since == calm.departed:
            calm.periods += 1
            self._evaluations.forget_step()
            return
        if calm is not None:
            self._watch.repeated_often(calm.periods)
            self._kinds.repeated_often(calm.periods)
            self._calm = None
        nothing_done = self._look(now, before, alone)
        if nothing_done and repeated and not self._evaluations.has_cut and not self._kinds.may_return:
            self._calm = _Calm(since)

    def _look(self, now: Glance, departed_before: int, alone: bool) -> bool:
        """Do what is to be done after a period; True if that was nothing, and found out without its log."""
        core, watch, kinds = self.core, self._watch, self._kinds
        departed, dram = now.departed, now.dram
        news = self._news  # once: what another thread says from here on is of the period after
        until_steps = self._evaluations.period_over(dram, may_be=alone and news is None)
        if until_steps is not None:
            self._lay_out_again()
            departed, dram = until_steps, core.glance().dram
        since = departed - departed_before
        self._claims.period_over(self._device, core, dram)
        sank = self._sink(dram, alone)
        self._bare = news is not None
        if news is not None:
            self._news = None
            core.forget_plan(news)
            self._let_go(partial(core.trim, news))  # gradients, too, are gone by now
            watch.expect_news()
            kinds.forget()
            return False
        repeated = bool(now.repeated) and not self._evaluations.has_cut
        forgot = None if sank else _forgot_after(now, since, watch, kinds, repeated=repeated)
        if forgot is not None:
            if forgot:
                self._plan(kinds.layouts())
            return not forgot
        last, before = self._evaluations.logs()
        look = watch.period_over(len(last.requests), since, repeated=repeats(last, before))
        forgot = kinds.period_over(last)
        if sank or look:
            counts = core.counts()
            # What is in use now lives on; and heaps end with pages that are used in part.
            room = counts.hbm_limit - counts.allocated - ENDS * core.page_bytes
            foreseen = foresee(last, before, max(0, room))
            if foreseen is not None:
                kinds.learn(last, foreseen)
                self._plan(kinds.layouts())
        elif forgot:
            self._plan(kinds.layouts())
        return False

    # ----------------------------------------------------------------------------------- layouts

    def _lay_out_again(self) -> None:
        """Give back what an evaluation left, and follow the layout from its begin.

        Idle, that would pass for what periods have no room for, and state would make room for it.
        """
        layouts = self._kinds.layouts()
        if layouts:
            self._plan(layouts)
            self._claims.trimmed(self._device, self.core)
        else:
            self._let_go(self.core.trim)

    def _plan(self, layouts: list[SequenceLayout]) -> None:
        while layouts:
            try:
                self.core.plan(*layouts)
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
        """There is no layout, for now: what is in the way, such as an evaluation's memory, may be gone later."""
        self._watch.refused()
        if not self._refused:
            self._refused = True
            log.warning("no layout for now (%s): blocks go where they fit best", error)

    def _let_go(self, trim: Callable[[], None]) -> None:
        try:
            trim()
        except CoreBusy:
            pass  # a graph is captured, which may use it
        except CoreError:
            log.exception("what lies idle on cuda:%d stays mapped", self._device)
        self._claims.trimmed(self._device, self.core)

    def _more(self) -> bool:
        """Claim more DRAM, for what can do without; whether there was some.

        It is claimed between two periods, when all lies idle that the next one needs.
        """
        return self._claims.more(self._device, self.core, GiB)

    # ------------------------------------------------------------------------------------- state

    def _sink(self, dram: int, alone: bool) -> bool:
        """Have state make room in HBM for the `dram` bytes that lie there, or take it back; whether it made room.

        What rises goes where nothing lies, so that the layout stays as it is: another one costs a step of a second.
        """
        self._spilled = self._spilled + 1 if dram else 0
        self.overflow = 0
        if not dram:
            return False
        core = self.core
        blocks = core.blocks()
        # Smaller ones are many and hold little; they move with those that they share a page with.
        blocks = blocks[(blocks["class"] == STATE) & (blocks["kind"] == USED) & (blocks["bytes"] >= 2 * PAGE)]
        state = [State(int(b["address"]), int(b["bytes"]), core.on(int(b["address"]), DRAM)) for b in blocks]
        self.overflow = max(0, dram - core.glance().dram_state)
        if self._spilled < PATIENCE or not alone:
            return False
        counts = core.counts()
        spare = counts.hbm_limit - counts.hbm  # what is mapped is needed again
        sink, rise = sink_or_rise(
            state, short=self.overflow, spare=spare, budget=counts.hbm_limit, page=core.page_bytes
        )
        moved = 0
        for tier, addresses in ((DRAM, sink), (HBM, rise)):
            for address in addresses:
                if not self._move(address, tier):
                    break
                moved += 1
        if moved:
            text = "%d blocks of optimizer state now lie in %s, to keep in hbm what is used more"
            log.info(text, moved, "dram" if sink else "hbm")
        return bool(moved and sink)

    def _move(self, address: int, tier: int) -> bool:
        """Put a block on a tier, claiming DRAM for it as long as there is some; whether all of it lies there."""
        while True:
            try:
                self.core.move(address, tier)
                return True
            except CoreBusy:
                return False
            except CoreFull:
                if tier == HBM or not self._more():
                    return False
            except CoreError as error:  # it lies where it lay
                log.warning("optimizer state stays where it is on cuda:%d: %s", self._device, error)
                return False


def _forgot_after(now: Glance, departed: int, watch: Watch, kinds: Kinds, *, repeated: bool) -> bool | None:
    """Take note of a period without its log; see `Kinds.period_over`, or None where its log has to be read.

    Thousands of requests take half a millisecond to read, in which the device has nothing to do.
    """
    if not departed and kinds.is_whole(now.present, now.came) and watch.nothing_departed():
        return kinds.came_as_laid_out(now.present)
    if repeated and watch.repeated(departed):
        return kinds.came_as_before()
    return None
