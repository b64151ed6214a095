"""The page-grouping allocator of a process: PyTorch's CUDA memory on our pages.

Installs the core under PyTorch, tells it where periods end, and gives it the layout that the last one
calls for. Pages lie in HBM while its budget lasts, and in DRAM that the GPU addresses after that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from allocator import adapter
from allocator.claims import DramClaims
from allocator.evaluations import Evaluations
from allocator.kinds import Kinds
from allocator.ledger import Account
from allocator.native import DRAM, HBM, STATE, USED, Core, CoreBusy, CoreError, CoreFull, Glance, is_aside
from allocator.room import Room
from allocator.sequence import Foreseen, Watch, foresee, repeats
from allocator.sinking import State, sink_or_rise
from allocator.sizes import PAGE, GiB, round_up

log = logging.getLogger("tiers")

PATIENCE = 8  # periods with something in DRAM before state sinks: a migrator makes do with less by then, if it can


class PageAllocator:
    """What the cores of all GPUs share. Made before CUDA is initialised; lasts as long as the process.

    Parameters
    ----------
    library : Path
        The adapter, as `allocator.adapter.build` returns it.
    hbm : int
        Budget per GPU, in bytes; 0 for all that is free.
    dram : int
        Most DRAM to map, in bytes.
    account : Account, optional
        Where DRAM is claimed before it is taken; without one, `dram` is this process's alone.
    room : callable, optional
        Tells what the system leaves now; no more DRAM is claimed than that.
    """

    def __init__(
        self, library: Path, hbm: int, dram: int, account: Account | None, room: Callable[[], Room] | None = None
    ) -> None:
        self._library = library
        self._hbm = hbm
        self._claims = DramClaims(dram, account, room)
        self._watches: dict[int, Watch] = {}
        self._kinds: dict[int, Kinds] = {}
        self._departed: dict[int, int] = {}
        self._overflow: dict[int, int] = {}
        self._spilled: dict[int, int] = {}  # periods in a row that had something in DRAM
        self._refused: set[int] = set()  # GPUs without a layout, which was said
        self._news: dict[int, int] = {}  # GPUs whose layouts are of no use from the next period on, and its peak
        self._evaluations = Evaluations()
        self._bare: set[int] = set()  # GPUs without a layout in this period, the first after news

    def install(self) -> None:
        """Become PyTorch's allocator for CUDA memory.

        Raises
        ------
        NoAdapter
            If CUDA is initialised already.
        """
        adapter.install(self._library, self._hbm, self._full)

    def borrow(self, lender: Callable[[int], int] | None) -> None:
        """Where no DRAM is left, have `lender` give back so many bytes that lie idle elsewhere; it says how many did.

        Called from any thread that asks for memory.
        """
        self._claims.lender = lender

    def cores(self) -> Iterator[tuple[int, Core]]:
        """The GPUs from which memory was asked for, and their cores."""
        for device in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
            core = adapter.core_of(self._library, device)
            if core is not None:
                yield device, core

    def limit(self, device: torch.device) -> int:
        """The budget of a GPU in bytes, also where none was set; 0 before its first request."""
        core = adapter.core_of(self._library, device.index) if device.type == "cuda" else None
        return core.counts().hbm_limit if core is not None else 0

    def lap(self, device: torch.device) -> Callable[..., int]:
        """What tells the most bytes that a GPU's program had in use, see `Core.lap`; 0 before the first."""
        library, index, cores = self._library, device.index, list[Core]()

        def lap(*, with_present: bool = False) -> int:
            if not cores and (core := adapter.core_of(library, index)) is not None:
                cores.append(core)
            return cores[0].lap(with_present=with_present) if cores else 0

        return lap

    def tidy(self, device: torch.device) -> None:
        """What was asked for aside has been given back: let go of what was mapped for it beside the layout.

        Where that one is of no use any more and there is no other, all that lies idle goes.
        """
        core = adapter.core_of(self._library, device.index)
        if core is not None:
            self._let_go(device.index, core, core.trim if device.index in self._bare else core.trim_outside)

    def begin(self) -> None:
        """The first period begins: what was asked for so far was of no period."""
        for _, core in self.cores():
            core.mark()

    def expect_news(self, device: torch.device, peak: int = 0, *, now: bool = False) -> None:
        """From the next period on other tensors stay and move on a GPU.

        That one goes by best fit, in what the one before leaves idle; what is more than that period is to need goes
        back. One that departs here and there from a layout that was another's finds places taken, and takes pages
        beside it, in DRAM where HBM is full. Nor are more pages made then than it is to need while others lie idle:
        between a budget and what is alive best fit would fill all there is.

        Parameters
        ----------
        peak : int
            What that period is expected to have in HBM, in bytes; 0 if nobody knows.
        now : bool
            Whether this one is over but for what frees memory, and nobody else allocates: then that is done at once, as
            the next one may be measured before it gets to its first forward.
        """
        self._news[device.index] = peak
        self._spilled.pop(device.index, None)
        core = adapter.core_of(self._library, device.index) if now else None
        if core is not None:
            self._let_go(device.index, core, partial(core.trim, peak))

    def spilled(self, device: torch.device) -> bool:
        """Whether something lies in DRAM, which the GPU then reads over the same link as the migrator."""
        return self._spilled.get(device.index, 0) > 0

    def overflow(self, device: torch.device) -> int:
        """Bytes of DRAM that the last period left mapped, without the state that sank there."""
        return self._overflow.get(device.index, 0)

    def step_over(self) -> None:
        """An optimizer has stepped: if it was the last, what comes until the period is over may be an evaluation's."""
        for device, core in self.cores():
            self._evaluations.step_over(device, core)

    def period_over(self, *, alone: bool = True) -> None:
        """A period ends: where its sequence of requests is new, plan the next one's layout after it.

        Parameters
        ----------
        alone : bool
            No other thread trains. One that does may launch kernels on state that is mapped nowhere while it moves: no
            wait for the device helps against what it launches after that.
        """
        for device, core in self.cores():
            core.mark()
            now = core.glance()
            watch, kinds = self._watches.setdefault(device, Watch()), self._kinds.setdefault(device, Kinds())
            departed, dram = now.departed, now.dram
            may_be = alone and device not in self._news
            until_steps = self._evaluations.period_over(device, core, dram, may_be=may_be)
            if until_steps is not None:
                self._lay_out_again(device, core, kinds.layouts())
                departed, dram = until_steps, core.glance().dram
            since, self._departed[device] = departed - self._departed.get(device, 0), now.departed
            self._claims.period_over(device, core, dram)
            sank = self._sink(device, core, dram, alone)
            if device in self._news:
                core.forget_plan(peak := self._news.pop(device))
                self._bare.add(device)
                self._let_go(device, core, partial(core.trim, peak))  # gradients, too, are gone by now
                watch.expect_news()
                kinds.forget()
                continue
            self._bare.discard(device)
            repeated = bool(now.repeated) and not self._evaluations.has_cut(device)
            forgot = None if sank else _forgot_after(now, since, watch, kinds, repeated=repeated)
            if forgot is not None:
                if forgot:
                    self._plan(device, core, kinds.layouts())
                continue
            last, before = self._evaluations.logs(device, core)
            look = watch.period_over(len(last.requests), since, repeated=repeats(last, before))
            forgot = kinds.period_over(last)
            if sank or look:
                foreseen = foresee(last, before)
                if foreseen is not None:
                    kinds.learn(last, foreseen)
                    self._plan(device, core, kinds.layouts())
            elif forgot:
                self._plan(device, core, kinds.layouts())

    def _lay_out_again(self, device: int, core: Core, layouts: list[Foreseen]) -> None:
        """Give back what an evaluation left, and follow the layout from its begin.

        Idle, that would pass for what periods have no room for, and state would make room for it.
        """
        if layouts:
            self._plan(device, core, layouts)
            self._claims.trimmed(device, core)
        else:
            self._let_go(device, core, core.trim)

    def _let_go(self, device: int, core: Core, trim: Callable[[], None]) -> None:
        try:
            trim()
        except CoreBusy:
            pass  # a graph is captured, which may use it
        except CoreError:
            log.exception("what lies idle on cuda:%d stays mapped", device)
        self._claims.trimmed(device, core)

    def _plan(self, device: int, core: Core, layouts: list[Foreseen]) -> None:
        while layouts:
            try:
                core.plan(*layouts)
            except CoreBusy:
                self._watches.pop(device, None)  # which is to look anew once the graph is captured
            except CoreFull as full:
                if self._more(device, GiB):  # the part of the region that does not fit into HBM
                    continue
                layouts = layouts[: len(layouts) > 1]  # the last kind alone may need less than all of them
                if layouts:
                    continue
                self._do_without(device, full)
            except CoreError as error:
                self._do_without(device, error)
            else:
                self._refused.discard(device)
            return

    def _do_without(self, device: int, error: CoreError) -> None:
        """There is no layout, for now: what is in the way, such as an evaluation's memory, may be gone later."""
        self._watches.setdefault(device, Watch()).refused()  # there is none if a graph was being captured just now
        if device not in self._refused:
            self._refused.add(device)
            log.warning("no layout for now (%s): blocks go where they fit best", error)

    def _sink(self, device: int, core: Core, dram: int, alone: bool) -> bool:
        """Have state make room in HBM for the `dram` bytes that lie there, or take it back; whether it made room.

        What rises goes where nothing lies, so that the layout stays as it is: another one costs a step of a second.
        """
        self._spilled[device] = self._spilled.get(device, 0) + 1 if dram else 0
        self._overflow[device] = 0
        if not dram:
            return False
        blocks = core.blocks()
        # A block without a whole page of its own cannot move.
        blocks = blocks[(blocks["class"] == STATE) & (blocks["kind"] == USED) & (blocks["bytes"] >= 2 * PAGE)]
        state = [State(int(b["address"]), int(b["bytes"]), core.on(int(b["address"]), DRAM)) for b in blocks]
        self._overflow[device] = max(0, dram - sum(block.sunk for block in state))
        if self._spilled[device] < PATIENCE or not alone:
            return False
        counts = core.counts()
        spare = counts.hbm_limit - counts.hbm  # what is mapped is needed again
        sink, rise = sink_or_rise(state, dram=dram, spare=spare, budget=counts.hbm_limit)
        moved = 0
        for tier, addresses in ((DRAM, sink), (HBM, rise)):
            for address in addresses:
                if not self._move(device, core, address, tier):
                    break
                moved += 1
        if moved:
            text = "%d blocks of optimizer state now lie in %s, to keep in hbm what is used more"
            log.info(text, moved, "dram" if sink else "hbm")
        return bool(moved and sink)

    def _move(self, device: int, core: Core, address: int, tier: int) -> bool:
        """Put a block on a tier, claiming DRAM for it as long as there is some; whether all of it lies there."""
        while True:
            try:
                core.move(address, tier)
                return True
            except CoreBusy:
                return False
            except CoreFull:
                if tier == HBM or not self._more(device, GiB):
                    return False
            except CoreError as error:  # it lies where it lay
                log.warning("optimizer state stays where it is on cuda:%d: %s", device, error)
                return False

    def state(self, on: bool) -> None:
        """Whether what is asked for from now on lives as long as the program, as an optimizer's state does."""
        for _, core in self.cores():
            core.state(on)

    def _full(self, device: int, nbytes: int) -> bool:
        """Every tier is full for a request of `nbytes`; whether to try again.

        Called by the adapter, from any thread, without any lock of the core's.
        """
        # Not `_more` itself: layouts are made while a recorded period stands aside, and may need DRAM.
        core = None if is_aside() else adapter.core_of(self._library, device)
        if core is None:
            return False
        counts = core.counts()
        # A block lies in DRAM as a whole: to claim what cannot hold it would take that from others for nothing.
        return self._more(device, nbytes, nbytes - (counts.dram_limit - counts.dram) - counts.idle, in_need=True)

    def _more(self, device: int, nbytes: int, least: int = PAGE, *, in_need: bool = False) -> bool:
        """Claim `nbytes` of DRAM, or what there is of them, if that is at least `least`; whether there was.

        Layouts, and state that would move, can do without. They are made between two periods, when all lies idle that
        the next one needs.
        """
        core = adapter.core_of(self._library, device)
        least = round_up(max(least, PAGE), PAGE)
        return core is not None and self._claims.more(device, core, nbytes, least, in_need=in_need)


def _forgot_after(now: Glance, departed: int, watch: Watch, kinds: Kinds, *, repeated: bool) -> bool | None:
    """Take note of a period without its log; see `Kinds.period_over`, or None where its log has to be read.

    Thousands of requests take half a millisecond to read, in which the device has nothing to do.
    """
    if not departed and kinds.is_whole(now.present, now.came) and watch.nothing_departed():
        return kinds.came_as_laid_out(now.present)
    if repeated and watch.repeated(departed):
        return kinds.came_as_before()
    return None
