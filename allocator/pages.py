"""The page-grouping allocator of a process: PyTorch's CUDA memory on our pages.

Installs the core under PyTorch, and tells it where periods end; what is decided then is each GPU's own
(`allocator.layout.periods`). Pages lie in HBM while its budget lasts, and in DRAM that the GPU addresses after that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from torch_tiers.allocator.host.claims import DramClaims
from torch_tiers.allocator.host.ledger import Account
from torch_tiers.allocator.host.room import Room
from torch_tiers.allocator.layout.periods import Periods
from torch_tiers.allocator.native import Core, is_aside
from torch_tiers.allocator.native.peaks import PeaksOfCore
from torch_tiers.allocator.native.pytorch import adapter
from torch_tiers.allocator.sizes import GiB

MARGIN = GiB  # of a GPU, for contexts and libraries of this process and of others


class PageAllocator:
    """What the cores of all GPUs share. Made before CUDA is initialised; lasts as long as the process.

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

    def free_beyond(self, device: torch.device) -> int:
        """Bytes of a GPU that are free beyond its budget, less a margin for what is not made by PyTorch."""
        periods = self._of(device.index)
        if periods is None:
            return 0
        counts = periods.core.counts()
        free = torch.cuda.mem_get_info(device)[0] - max(0, counts.hbm_limit - counts.hbm)
        return max(0, free - MARGIN)

    def lend(self, device: torch.device, nbytes: int) -> None:
        """Let a GPU's program take so many bytes of HBM beyond its budget; 0 takes that back.

        What is more than the budget by then goes as it is freed.
        """
        periods = self._of(device.index)
        if periods is not None:
            periods.lend(nbytes)

    def withhold(self, device: torch.device, nbytes: int) -> None:
        """Keep so many bytes of a GPU's budget for what is not made by PyTorch, such as staging slots; 0 ends that."""
        periods = self._of(device.index)
        if periods is not None:
            periods.withhold(nbytes)

    def peaks(self, device: torch.device) -> PeaksOfCore:
        """What tells the most bytes that a GPU's program had in use; for one caller, as each peak is told once."""

        def core() -> Core | None:
            periods = self._of(device.index)
            return periods.core if periods is not None else None

        return PeaksOfCore(core)

    def state(self, on: bool) -> None:
        """Whether what is asked for from now on lives as long as the program, as an optimizer's state does."""
        for _, core in self.cores():
            core.state(on)

    # ----------------------------------------------------------------------------------- periods

    def begin(self) -> None:
        """The first period begins: what was asked for so far was of no period."""
        for _, periods in self._all():
            periods.begin()

    def step_over(self) -> None:
        """An optimizer has stepped: if it was the last, what comes until the period is over may be an evaluation's."""
        for _, periods in self._all():
            periods.step_over()

    def period_over(self, *, alone: bool = True) -> None:
        """A period ends on all GPUs; `alone`, no other thread trains, see `Periods.period_over`."""
        for _, periods in self._all():
            periods.period_over(alone=alone)

    def tidy(self, device: torch.device) -> None:
        """What was asked for aside on a GPU has been given back: let go of what was mapped for it."""
        periods = self._of(device.index)
        if periods is not None:
            periods.tidy()

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
        periods = self._of(device.index)
        if periods is not None:
            periods.expect_news(peak, now=now)

    def spilled(self, device: torch.device) -> bool:
        """Whether something lies in DRAM, which the GPU then reads over the same link as the migrator."""
        periods = self._known.get(device.index)
        return periods is not None and periods.spilled

    def overflow(self, device: torch.device) -> int:
        """Bytes of DRAM that the last period left mapped, without the state that sank there."""
        periods = self._known.get(device.index)
        return periods.overflow if periods is not None else 0

    # -------------------------------------------------------------------------------------- DRAM

    def _full(self, device: int, nbytes: int) -> bool:
        """Every tier is full for a request of `nbytes`; whether to try again.

        Called by the adapter, from any thread, without any lock of the core's.
        """
        # Layouts are made while a recorded period stands aside, and may need DRAM: these ask for themselves.
        periods = None if is_aside() else self._of(device)
        if periods is None:
            return False
        counts = periods.core.counts()
        # A block lies in DRAM as a whole: to claim what cannot hold it would take that from others for nothing.
        least = nbytes - (counts.dram_limit - counts.dram) - counts.idle
        return self._claims.more(device, periods.core, nbytes, least, in_need=True)
