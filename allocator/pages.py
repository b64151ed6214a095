"""The page-grouping allocator of a process: it serves PyTorch's requests for CUDA memory from our own pages.

`PageAllocator` installs the native core as PyTorch's allocator, and passes on where steps end to each GPU's
`allocator.layout.periods`. Pages lie in HBM while its budget lasts, and after that in DRAM that the GPU addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch

from torch_tiers.allocator.host.claims import DramClaims
from torch_tiers.allocator.host.ledger import Account
from torch_tiers.allocator.host.room import Room
from torch_tiers.allocator.layout.periods import Periods
from torch_tiers.allocator.layout.residence import Residence
from torch_tiers.allocator.native import Core, is_off_sequence
from torch_tiers.allocator.native.peaks import PeaksOfCore
from torch_tiers.allocator.native.pytorch import adapter
from torch_tiers.allocator.overflow import FITS, Overflow, is_slight
from torch_tiers.allocator.sizes import GiB

MARGIN = GiB  # of a GPU, for contexts and libraries of this process and of others


class StateRoom(NamedTuple):
    """The room of one GPU for an optimizer's state.

    Attributes
    ----------
    hbm : int
        Bytes of HBM that all else leaves. What state takes beyond them lies in DRAM from the beginning: it would have
        to make room later, when what is used more lies there.
    expected : int
        Bytes that the state is expected to take.
    """

    hbm: int
    expected: int


class PageAllocator:
    """The allocator of all GPUs. Made before CUDA is initialised; lasts as long as the process.

    Parameters
    ----------
    library : Path
        The adapter, as `allocator.native.pytorch.adapter.build` returns it.
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
        self._known: dict[int, Periods] = {}  # by GPU
        self.periods = 0  # that have ended

    def install(self) -> None:
        """Become PyTorch's allocator for CUDA memory.

        Raises
        ------
        NoAdapter
            If CUDA is initialised already.
        """
        adapter.install(self._library, self._hbm, self._full)

    def borrow(self, lender: Callable[[int], int] | None) -> None:
        """Call `lender` with a number of bytes where no DRAM is left; None ends that.

        It releases as many bytes of DRAM that lie idle elsewhere in this process, and returns how many it did. It is
        called from any thread that asks for memory.
        """
        self._claims.lender = lender

    # -------------------------------------------------------------------------------------- GPUs

    def cores(self) -> Iterator[tuple[int, Core]]:
        """The GPUs from which memory was asked for, and their cores."""
        return ((device, periods.core) for device, periods in self._all())

    def _all(self) -> Iterator[tuple[int, Periods]]:
        for device in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
            periods = self._of(device)
            if periods is not None:
                yield device, periods

    def _of(self, device: int) -> Periods | None:
        """The periods of a GPU; None before its first request. For any thread."""
        known = self._known.get(device)
        if known is None and (core := adapter.core_of(self._library, device)) is not None:
            known = self._known.setdefault(device, Periods(device, core, self._claims))
        return known

    def limit(self, device: torch.device) -> int:
        """The budget of a GPU in bytes, also where none was set; 0 before its first request."""
        periods = self._of(device.index) if device.type == "cuda" else None
        return periods.core.counts().hbm_limit if periods is not None else 0

    def in_use(self, device: torch.device) -> int:
        """Bytes of a GPU's memory that are in use, on all tiers; 0 before its first request."""
        periods = self._of(device.index)
        return periods.core.counts().allocated if periods is not None else 0

    def free_beyond(self, device: torch.device) -> int:
        """Bytes of a GPU that are free beyond its budget, less a margin for what is not made by PyTorch."""
        periods = self._of(device.index)
        if periods is None:
            return 0
        counts = periods.core.counts()
        free = torch.cuda.mem_get_info(device)[0] - max(0, counts.hbm_limit - counts.hbm)
        return max(0, free - MARGIN)

    def lend(self, device: torch.device, nbytes: int) -> None:
        """Raise a GPU's limit by `nbytes` beyond its budget; 0 restores it.

        What is above the limit then is released as the program frees it.
        """
        periods = self._of(device.index)
        if periods is not None:
            periods.lend(nbytes)

    def withhold(self, device: torch.device, nbytes: int) -> None:
        """Lower a GPU's limit by `nbytes`, for what PyTorch does not allocate, such as staging slots; 0 restores it."""
        periods = self._of(device.index)
        if periods is not None:
            periods.withhold(nbytes)

    def peaks(self, device: torch.device) -> PeaksOfCore:
        """Measures the most bytes that a GPU's program had in use; for one caller, as each call begins a new peak."""

        def core() -> Core | None:
            periods = self._of(device.index)
            return periods.core if periods is not None else None

        return PeaksOfCore(core)

    def state(self, on: bool, room: Mapping[int, StateRoom] = MappingProxyType({})) -> None:
        """Whether requests from now on live as long as the program, as an optimizer's state does.

        Parameters
        ----------
        room : mapping of int to StateRoom
            By GPU. Where none is given, state takes all HBM that is free.
        """
        for device, core in self.cores():
            if (given := room.get(device)) is None or given.expected <= given.hbm:
                core.state(on)
                continue
            if (lacking := _lacking_dram(core, given)) > 0:
                self._claims.more(device, core, lacking)
            core.state(on, given.hbm)

    def state_without_room(self, room: Mapping[int, StateRoom]) -> dict[int, int]:
        """Bytes of state by GPU for which the room in HBM and DRAM is not enough, after `state` has claimed DRAM."""
        lacking = {device: _lacking_dram(core, room[device]) for device, core in self.cores() if device in room}
        return {device: nbytes for device, nbytes in lacking.items() if nbytes > 0}

    def release_dram(self, device: int, nbytes: int) -> int:
        """Release up to `nbytes` of the DRAM that a GPU's core has claimed and not mapped; return how many it were."""
        periods = self._of(device)
        return 0 if periods is None else self._claims.release_unused(device, periods.core, nbytes)

    # ----------------------------------------------------------------------------------- periods

    def begin(self) -> None:
        """The first period begins: requests before it belong to none."""
        for _, periods in self._all():
            periods.begin()

    def step_over(self) -> None:
        """An optimizer has stepped. If it is the period's last, the requests until its end may be an evaluation's."""
        for _, periods in self._all():
            periods.step_over()

    def period_over(self, *, alone: bool = True, planning: bool = False) -> None:
        """A period has ended on all GPUs; see `Periods.period_over`."""
        self.periods += 1
        for _, periods in self._all():
            periods.period_over(alone=alone, planning=planning)

    def tidy(self, device: torch.device) -> None:
        """Unmap what was mapped on a GPU for requests off the sequence, which have been freed by now."""
        periods = self._of(device.index)
        if periods is not None:
            periods.tidy()

    def expect_new_plans(self, device: torch.device, peak: int = 0, *, now: bool = False) -> None:
        """Other tensors stay and move on a GPU from the next period on: its layout is of no use any more.

        The next period is served by best fit, from pages that the one before leaves idle; what it is not expected to
        need is released. The old layout would be worse: requests that depart from it here and there find their places
        taken, and take new pages, in DRAM where HBM is full. While pages lie idle, no more are made in that period
        than it is expected to need: best fit would otherwise fill the budget.

        Parameters
        ----------
        peak : int
            The most that period is expected to have in HBM, in bytes; the budget if that is unknown.
        now : bool
            Release memory at once, not at the period's end: the present period only frees from now on, and no other
            thread allocates. The next one may be measured before its first forward.
        """
        periods = self._of(device.index)
        if periods is not None:
            periods.expect_new_plans(peak, now=now)

    def spilled(self, device: torch.device) -> bool:
        """Whether more than streamed weights lies in DRAM: the GPU reads that over the same link as the migrator."""
        periods = self._known.get(device.index)
        return periods is not None and periods.residence.spilled

    @property
    def state_in_dram(self) -> int:
        """Bytes of optimizer state that lay in DRAM when the last period ended, on all GPUs."""
        return sum(periods.residence.state for periods in self._known.values())

    @property
    def state_in_place(self) -> int:
        """Bytes of that which optimizers read and write there, on all GPUs: all but what is streamed."""
        return sum(periods.residence.in_place for periods in self._known.values())

    @property
    def lasting_overflow(self) -> int:
        """Bytes for which there was no room in HBM in several periods in a row, the last one included, on all GPUs."""
        residences = [periods.residence for periods in self._known.values()]
        return sum(residence.overflow for residence in residences if residence.is_short)

    @property
    def uses_dram(self) -> bool:
        """Whether more than next to nothing of a step lies in DRAM besides weights: no plan knows what that takes."""
        nbytes = self.state_in_dram + self.lasting_overflow
        budgets = (periods.core.counts().hbm_limit for periods in self._known.values())
        return nbytes > 0 and not is_slight(nbytes, sum(budgets))

    def overflow(self, device: torch.device, threads: int = 1) -> Overflow:
        """What HBM had no room for in the last period; of several `threads` each has caused as much."""
        periods = self._known.get(device.index)
        if periods is None:
            return FITS
        return Overflow(periods.residence.overflow // threads, self.periods, periods.came_as_laid_out)

    def is_short(self, device: torch.device) -> bool:
        """Whether there was no room in HBM for several periods in a row, the last one included."""
        periods = self._known.get(device.index)
        return periods is not None and periods.residence.is_short

    def residence(self, device: torch.device) -> Residence | None:
        """Which state and weights of a GPU lie in DRAM; None before its first request, and for other devices."""
        periods = self._of(device.index) if device.type == "cuda" else None
        return periods.residence if periods is not None else None

    # -------------------------------------------------------------------------------------- DRAM

    def _full(self, device: int, nbytes: int) -> bool:
        """Every tier is full for a request of `nbytes`: claim DRAM for it; whether to try again.

        Called by the adapter, from any thread, without any lock of the core's.
        """
        # Layouts are made off the sequence in recorded periods, and may need DRAM: `Periods` claims it for them.
        periods = None if is_off_sequence() else self._of(device)
        if periods is None:
            return False
        counts = periods.core.counts()
        # A block lies in DRAM as a whole: to claim what cannot hold it would take that from others for nothing.
        least = nbytes - (counts.dram_limit - counts.dram) - counts.idle
        return self._claims.more(device, periods.core, nbytes, least, in_need=True)


def _lacking_dram(core: Core, room: StateRoom) -> int:
    """Bytes of state beyond its room in HBM for which a core has claimed no DRAM."""
    counts = core.counts()
    return room.expected - room.hbm - (counts.dram_limit - counts.dram)
