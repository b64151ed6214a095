"""Puts optimizer state of one device on NVMe, in parts that are read, updated and written one after the other."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager

from torch import Tensor

from torch_tiers.allocator.errors import TiersError
from torch_tiers.allocator.host.dram import DramBlock
from torch_tiers.allocator.sizes import PAGE, round_up
from torch_tiers.migrator.offload.backing import Backing
from torch_tiers.migrator.offload.stored import StoredGroup
from torch_tiers.migrator.state import slices
from torch_tiers.migrator.state.nvme_tensor import NvmeBytes, NvmeTensor
from torch_tiers.migrator.state.streamer import STALL
from torch_tiers.migrator.streams import Compute, Event, Lane
from torch_tiers.migrator.streams.pieces import bytes_of, whole
from torch_tiers.migrator.telemetry.counters import Counters

AHEAD = 3  # parts that are being read while one is copied
LAST = sys.maxsize  # when parts are needed, by the measure of groups: after all that a backward needs


class NvmeState:
    """State of one device on NVMe. It comes and goes by way of host memory.

    Parameters
    ----------
    compute : Compute
        The program's streams.
    read, write : Lane
        From host memory to the device, and back.
    backing : Backing
        Has the store, and the blocks of host memory.
    counters : Counters
        Receive the host's waits for the store.

    Attributes
    ----------
    lock : RLock
        Held in an optimizer's step, and while somebody else reads: it would get what is half updated.
    nbytes : int
        Bytes of all parts.
    """

    def __init__(self, compute: Compute, read: Lane, write: Lane, backing: Backing, counters: Counters) -> None:
        self._compute = compute
        self._read = read
        self._write = write
        self._backing = backing
        self.directory = backing.directory
        self._unused: deque[StoredGroup] = deque()  # of tensors that are gone; dropped by who comes next
        self._counters = counters
        self._writing: deque[StoredGroup] = deque()  # those of which a write was asked for last, the oldest first
        self._pid = os.getpid()
        self._closed = self._stepping = False
        self.lock = threading.RLock()
        self.nbytes = 0

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """An optimizer updates parts in this scope."""
        with self.lock:
            self.drop_unused()
            self._stepping = True
            try:
                yield
            finally:
                self._stepping = False

    def check_idle(self) -> None:
        """Raise TiersError within a step, as where a signal's handler asks. Call with the lock."""
        if self._stepping:
            raise TiersError("optimizer state that lies on nvme is being updated: write it after the step")

    def put(self, tensor: Tensor) -> NvmeTensor:
        """Put a contiguous tensor on NVMe, in parts. Its memory may be freed.

        Raises
        ------
        TierFull
            If there is no room. Nothing has changed then.
        """
        self.drop_unused()
        self._compute.hand_over(tensor)  # which may be of another stream
        stream = self._compute.stream()
        begun, stored = self._compute.mark(stream), list[StoredGroup]()
        try:
            for part in tensor.detach().view(-1).split(slices.NUMBERS):
                group = self._backing.new(part.nbytes, LAST, "nvme")
                self._counters.groups -= 1  # the backing counts page groups, and this is none
                stored.append(group)
                assert group.block is not None
                group.filled = self._write.copy([whole(group.block.tensor, bytes_of(part))], [*group.after, begun])
                if not self._write_out(group):
                    raise self._backing.full(group.nbytes)
        except BaseException:
            self.mark_unused(stored)
            raise
        finally:  # before the memory is anybody else's
            for group in stored:
                if group.filled is not None:
                    self._compute.wait(group.filled, STALL, stream)
            with self.lock:
                self.nbytes += sum(group.nbytes for group in stored)  # also of those that are dropped soon
        return NvmeTensor(tensor, NvmeBytes(self, tensor, stored, slices.NUMBERS))

    def read_into(self, stored: Sequence[StoredGroup], target: Tensor) -> None:
        """Copy the parts of a tensor into a contiguous one, for what the present stream does from now on.

        Raises
        ------
        StoreError
            If the store does not return what was written.
        TiersError
            After the session, or in a process that was forked, which has none of the threads that read.
        """
        if os.getpid() != self._pid:
            raise TiersError("optimizer state lies on nvme, which a forked process cannot read: start it by spawn")
        if self._closed:
            raise TiersError("the session is over, and what it had put on NVMe with it: use that within the session")
        with self.lock:
            self._read_into(stored, bytes_of(target))

    def _read_into(self, stored: Sequence[StoredGroup], target: Tensor) -> None:
        stream = self._compute.stream()
        begun, copies, first = self._compute.mark(stream), list[Event](), 0

        def copy(block: DramBlock) -> Event:
            part = target[first : first + group.nbytes]
            # The last copy into the block may be under way, as of a slice that was updated.
            after = [begun] if group.filled is None else [begun, group.filled]
            copies.append(self._read.copy([whole(part, block.tensor)], after))
            return copies[-1]

        try:
            for place, group in enumerate(stored):
                for coming in stored[place + 1 : place + 1 + AHEAD]:
                    self._backing.read_ahead(coming)
                self._backing.lend(group, copy, keep=False)
                first += group.nbytes
        finally:  # before the memory is anybody else's
            for event in copies:
                self._compute.wait(event, STALL, stream)

    def read_ahead(self, stored: StoredGroup) -> None:
        """Start to read a part, if host memory has room for it."""
        self._backing.read_ahead(stored)

    def check_out(self, stored: StoredGroup) -> Tensor:
        """Return the bytes of a part in host memory, where they may be changed until `check_in`."""
        return self._backing.take(stored).tensor

    def check_in(self, stored: StoredGroup, filled: Event) -> None:
        """Have a part that was checked out written to NVMe, once the last copy into its bytes is over."""
        stored.filled = filled
        self._write_out(stored)

    def _write_out(self, stored: StoredGroup) -> bool:
        """Have a part written; whether the store has room. It waits while more than DRAM is left for is on its way."""
        with self.lock:
            goes = self._backing.filled(stored)
            self._writing.append(stored)
            while sum(round_up(group.nbytes, PAGE) for group in self._writing) > slices.IN_TRANSIT // 2:
                oldest = self._writing.popleft().writing
                if oldest is not None and not oldest.done():
                    with self._counters.waiting("disk_write"):
                        wait([oldest])
            return goes

    def drop_unused(self) -> None:
        """Free what tensors had that are gone."""
        while self._unused:
            try:
                stored = self._unused.popleft()
            except IndexError:  # another thread was first
                return
            self._backing.drop(stored)
            with self.lock:
                self.nbytes -= stored.nbytes

    def mark_unused(self, stored: Sequence[StoredGroup]) -> None:
        """Take note that the tensor of these parts is gone.

        This takes no lock: Python's garbage collector may call it in a thread that holds the backing's.
        """
        self._unused.extend(stored)

    def close(self) -> None:
        """Wait for copies that are under way. No more may come."""
        self._closed = True
        self._read.close()
        self._write.close()
