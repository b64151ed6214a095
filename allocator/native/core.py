"""`Core`: the native core of one GPU's memory, in Python. See `core.h` for the C interface beneath."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_tiers.allocator.native.binding import (
    BLOCK,
    PARTS,
    PLAIN,
    REQUEST,
    U64,
    Glance,
    Stats,
    checked,
    exclusive,
    library,
)
from torch_tiers.allocator.native.sequence_layout import SequenceLayout

COUNTED = ("maps", "unmaps", "waits", "retries", "planned", "mispredicted", "misplaced")


@dataclass(frozen=True, slots=True)
class Counts:
    """Counters and sizes of a core.

    Attributes
    ----------
    allocated, allocated_peak : int
        Bytes in use by the program.
    hbm, hbm_peak, hbm_limit, dram, dram_peak, dram_limit : int
        Bytes of physical pages.
    demoted : int
        Bytes in use, of state and of blocks that were moved, that lie in DRAM.
    idle : int
        Bytes that are mapped and not in use.
    maps, unmaps, waits : int
        Pages mapped and unmapped, and waits for a stream that this took.
    retries : int
        Requests for which a tier was full before idle pages were taken from elsewhere.
    planned, mispredicted, misplaced : int
        Requests served where the layout has them, those the layout does not know, and those whose place was taken.
    """

    allocated: int
    allocated_peak: int
    hbm: int
    hbm_peak: int
    hbm_limit: int
    dram: int
    dram_peak: int
    dram_limit: int
    demoted: int
    idle: int
    maps: int
    unmaps: int
    waits: int
    retries: int
    planned: int
    mispredicted: int
    misplaced: int


class Core:
    """The pages and blocks of one GPU. Every method may be called from any thread.

    Parameters
    ----------
    backend : str
        ``cuda``, or ``memfd`` where there is no GPU.
    hbm, dram : int
        Most physical memory to take, in bytes.
    device : int
        Number of the GPU.

    Raises
    ------
    CoreError
        If the library was not built, or the driver lacks what the backend needs.
    """

    def __init__(self, backend: str, hbm: int, dram: int, device: int = 0) -> None:
        self._library = library()
        self._core = ctypes.c_void_p()
        checked(self._library.tn_open(backend.encode(), device, hbm, dram, ctypes.byref(self._core)))

    @classmethod
    def at(cls, address: int) -> Core:
        """Wrap the core at `address`, which the adapter made; it is the adapter's, and must not be closed."""
        core = cls.__new__(cls)
        core._library, core._core = library(), ctypes.c_void_p(address)
        return core

    def close(self) -> None:
        """Unmap and release everything. Nothing may be in use. Idempotent."""
        if self._core.value is not None:
            core, self._core = self._core, ctypes.c_void_p()
            checked(self._library.tn_close(core))

    def allocate(self, nbytes: int, stream: int = 0, pool: int = 0) -> int:
        """Allocate `nbytes` for work on `stream`; the address, aligned to 512 bytes.

        Raises
        ------
        CoreFull
            If every tier is full.
        """
        address = U64()
        checked(self._library.tn_allocate(self._core, nbytes, stream, pool, ctypes.byref(address)))
        return address.value

    def free(self, address: int) -> None:
        """Free a block; work of its stream may still be using it."""
        checked(self._library.tn_free(self._core, address))

    def used_on(self, address: int, stream: int) -> None:
        """The block is used on `stream` as well: its free is pending until that stream is done with it."""
        checked(self._library.tn_used_on(self._core, address, stream))

    def trim(self, keep: int = 0) -> None:
        """Return idle memory to the system; waits for what may read it.

        Parameters
        ----------
        keep : int
            Bytes of HBM to keep. Most of what lies idle of these stays mapped where it is: to release a page and make
            another takes the driver 20 to 60 us, and to map it 80.
        """
        checked(self._library.tn_trim(self._core, keep))

    def trim_outside(self) -> None:
        """Release what is idle outside of the layout's region; does nothing while a graph may be captured."""
        checked(self._library.tn_trim_outside(self._core))

    def share(self, device: int) -> None:
        """Let another GPU access all memory, now and later; PyTorch's adapter does so where GPUs become peers."""
        checked(self._library.tn_share(self._core, device))

    def retire(self, pool: int) -> None:
        """Let a private pool's memory serve other requests once it is free."""
        checked(self._library.tn_pool_retire(self._core, pool))

    def capture(self, begins: bool) -> None:
        """A graph may be captured from now on (or no more); meanwhile the core never waits for all streams."""
        self._library.tn_capture(self._core, int(begins))

    def state(self, on: bool, most_hbm: int = (1 << 64) - 1) -> None:
        """Whether the requests that follow live as long as the program, as an optimizer's state does.

        Parameters
        ----------
        most_hbm : int
            Bytes of HBM that state may take beyond what it has. What follows goes to DRAM while that has room.
        """
        self._library.tn_class(self._core, int(on), most_hbm)

    def limit(self, tier: int, nbytes: int) -> None:
        """Change how much physical memory may be taken."""
        checked(self._library.tn_limit(self._core, tier, nbytes))

    def mark(self) -> Glance:
        """A period ends, and the next begins; the `Glance` at that moment."""
        glance = Glance()
        self._library.tn_mark(self._core, ctypes.byref(glance))
        return glance

    def log(self, ago: int = 0) -> tuple[npt.NDArray[Any], int]:
        """The requests (as `REQUEST`) and the number of events of the last whole period, or of the one before (1).

        Empty if there were too many requests to lay out.
        """
        events = U64()
        count = self._library.tn_log(self._core, ago, None, 0, ctypes.byref(events))
        requests = np.empty(count, REQUEST)
        there = self._library.tn_log(self._core, ago, requests.ctypes.data, count, ctypes.byref(events))
        return requests[: min(count, there)], events.value  # another thread may have ended a period in between

    def set_layout(self, *sequences: SequenceLayout) -> None:
        """Lay out the periods to come, the present one included; each is expected to be one of `sequences`.

        Parameters
        ----------
        sequences : SequenceLayout
            All on one stream. They share a region, as only a period's first requests show which one it is.

        Raises
        ------
        CoreFull
            If the tiers have no room for the region; then there is no layout any more.
        CoreBusy
            If the stream is being captured; then the layout stays as it was.
        """
        counts = np.array([len(one.sizes) for one in sequences], np.uint64)
        requests = [np.concatenate([one.least.astype(np.uint64) for one in sequences])]
        requests += [np.concatenate([one.sizes.astype(np.uint64) for one in sequences])]
        requests += [np.concatenate([one.offsets for one in sequences])]
        costs = np.zeros(max(len(one.costs) for one in sequences), np.int64)
        for one in sequences:
            costs[: len(one.costs)] += one.costs
        pointers = (counts.ctypes.data, *(each.ctypes.data for each in requests), len(costs), costs.ctypes.data)
        checked(self._library.tn_set_layout(self._core, sequences[0].stream, len(sequences), *pointers))

    def forget_layout(self, expected: int = 0) -> None:
        """From now on there is no layout; what was mapped for it stays mapped, and serves any request.

        Until the next mark or layout the core hardly grows: while pages lie idle, these are mapped anew where one is
        missing, and none is made beyond what is alive, or beyond `expected` bytes if that is more. To map a page anew
        waits for its stream.
        """
        self._library.tn_forget_layout(self._core, expected)

    def move(self, address: int, tier: int) -> None:
        """Move a block's pages to `tier`, under the same address; waits for all streams, unless they lie there.

        From then on what of it lies in DRAM needs no HBM. Pages that it has a part of move to HBM; to DRAM only if it
        is state, as what lies beside it may be read more often.

        Raises
        ------
        CoreFull
            If the tier has no room; the pages that were moved by then stay there.
        CoreBusy
            If a stream is being captured.
        """
        checked(self._library.tn_wait_to_move(self._core, address, tier))
        # While it moves it is mapped nowhere: a thread that launched what reads it would end the process. There may be
        # one of the program's, such as one that writes a checkpoint.
        checked(exclusive().tn_move(self._core, address, tier))

    def on(self, address: int, tier: int) -> int:
        """Bytes of a block that lie on `tier`."""
        return int(self._library.tn_on(self._core, address, tier))

    def pages_on(self, address: int, nbytes: int, tier: int) -> int:
        """Bytes of the pages on `tier` that `nbytes` from `address` on have a part of."""
        return int(self._library.tn_pages_on(self._core, address, nbytes, tier))

    def glance(self) -> Glance:
        """The few counters that are read after every period: of requests, and of DRAM."""
        glance = Glance()
        self._library.tn_get_glance(self._core, ctypes.byref(glance))
        return glance

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return int(self._library.tn_page_bytes(self._core))

    def counts(self) -> Counts:
        """What was counted so far."""
        stats = Stats()
        self._library.tn_get_stats(self._core, ctypes.byref(stats))
        plain = {name: getattr(stats, name) for name in PLAIN}
        return Counts(
            allocated=stats.allocated[0].current,
            allocated_peak=stats.allocated[0].peak,
            hbm=plain["hbm_bytes"],
            hbm_peak=plain["hbm_peak"],
            hbm_limit=plain["hbm_limit"],
            dram=plain["dram_bytes"],
            dram_limit=plain["dram_limit"],
            dram_peak=plain["dram_peak"],
            demoted=plain["demoted_bytes"],
            idle=plain["idle_bytes"],
            **{name: plain[name] for name in COUNTED},
        )

    def delayed(self) -> float:
        """Seconds that requests have waited so far, in all threads, while pages were mapped or room was made."""
        return float(self._library.tn_delayed(self._core)) / 1e9

    def retries(self) -> int:
        """How often HBM was full until idle pages were unmapped, see `Counts`."""
        return int(self._library.tn_retries(self._core))

    def reset_peaks(self) -> None:
        """Peaks begin anew at what is in use now."""
        self._library.tn_reset_peaks(self._core)

    def take_peak(self, of: int = PARTS, *, with_present: bool = False) -> int:
        """The most bytes in use since the last call `of` the same kind, or now, without what was demoted.

        No other peak begins anew.

        What lies idle on streams other than the layout's counts as in use, as the layout cannot use it.

        Parameters
        ----------
        with_present : bool
            Whether what is in use now counts in the next peak, too.
        """
        return int(self._library.tn_take_peak(self._core, of, with_present))

    def blocks(self) -> npt.NDArray[Any]:
        """All mapped blocks, as `BLOCK`, by heap and address."""
        capacity = int(self._library.tn_blocks(self._core, None, 0)) + 64  # other threads may add some
        blocks = np.empty(capacity, BLOCK)
        return blocks[: min(capacity, int(self._library.tn_blocks(self._core, blocks.ctypes.data, capacity)))]


def is_off_sequence() -> bool:
    """Whether this thread is within `off_sequence`."""
    return bool(library().tn_is_off_sequence())


@contextmanager
def off_sequence() -> Iterator[None]:
    """Requests of this thread inside are not part of the program's sequence; they have to be freed inside, too.

    For work of ours in the midst of a step, such as trials of recomputation. Its blocks lie wherever HBM has room, and
    where there is none the request fails. They are not logged, so the prediction of the program's own requests is not
    affected.
    """
    core = library()
    core.tn_off_sequence(1)
    try:
        yield
    finally:
        core.tn_off_sequence(0)
