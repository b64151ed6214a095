"""Puts optimizer state of one device on NVMe, in parts that are read, updated and written one after the other."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from torch_tiers.allocator.errors import TiersError
from torch_tiers.allocator.host.dram import DramBlock
from torch_tiers.migrator.offload.backing import Backing
from torch_tiers.migrator.offload.stored import StoredGroup
from torch_tiers.migrator.state import slices
from torch_tiers.migrator.state.nvme_tensor import BytesOnNvme, NvmeTensor
from torch_tiers.migrator.streams import Compute, Event, Lane
from torch_tiers.migrator.streams.pieces import flat, whole

STALL = "state"


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
    """

    def __init__(self, compute: Compute, read: Lane, write: Lane, backing: Backing) -> None:
        self._compute = compute
        self._read = read
        self._write = write
        self._backing = backing
        self.directory = backing.directory
        self._unused: deque[StoredGroup] = deque()  # of tensors that are gone; dropped by who comes next
        self._pid = os.getpid()

    def put(self, tensor: Tensor) -> NvmeTensor:
        """Put a contiguous tensor on NVMe, in parts. Its memory may be freed.

        Raises
        ------
        TierFull
            If there is no room. Nothing has changed then.
        """
        self.drop_unused()
        stream = self._compute.stream()
        begun, stored = self._compute.mark(stream), list[StoredGroup]()
        try:
            for part in tensor.detach().view(-1).split(slices.NUMBERS):
                group = self._backing.new(part.nbytes, 0, "nvme")
                stored.append(group)
                assert group.block is not None
                group.filled = self._write.copy([whole(group.block.tensor, _bytes(part))], [*group.after, begun])
                self._backing.filled(group)
        except BaseException:
            self.forget(stored)
            raise
        finally:  # before the memory is anybody else's
            for group in stored:
                if group.filled is not None:
                    self._compute.wait(group.filled, STALL, stream)
        return NvmeTensor(tensor, BytesOnNvme(self, tensor, stored, slices.NUMBERS))

    def read_into(self, stored: Sequence[StoredGroup], target: Tensor) -> None:
        """Copy the parts of a tensor into a contiguous one, for what the present stream does from now on.

        Raises
        ------
        StoreError
            If the store does not return what was written.
        TiersError
            In a process that was forked: it has none of the threads that read.
        """
        if os.getpid() != self._pid:
            raise TiersError("optimizer state lies on nvme, which a forked process cannot read: start it by spawn")
        stream = self._compute.stream()
        begun, bytes_ = self._compute.mark(stream), _bytes(target.view(-1))
        lent, first = list[StoredGroup](), 0
        try:
            for group in stored:
                self._backing.lend(group, partial(self._copy_back, bytes_[first : first + group.nbytes], begun))
                lent.append(group)
                first += group.nbytes
        finally:  # before the memory is anybody else's
            for group in lent:
                if group.returned is not None:
                    self._compute.wait(group.returned, STALL, stream)

    def _copy_back(self, target: Tensor, begun: Event, block: DramBlock) -> Event:
        return self._read.copy([whole(target, block.tensor)], [begun])

    def read_ahead(self, stored: StoredGroup) -> None:
        """Start to read a part, if host memory has room for it."""
        self._backing.read_ahead(stored)

    def take(self, stored: StoredGroup) -> Tensor:
        """Return the bytes of a part in host memory, where they may be changed: `put_back` ends that."""
        return self._backing.take(stored).tensor

    def put_back(self, stored: StoredGroup, filled: Event) -> None:
        """Have a part that was taken written to NVMe, once the last copy into its bytes is over."""
        stored.filled = filled
        self._backing.filled(stored)

    def drop_unused(self) -> None:
        """Free what tensors had that are gone."""
        while self._unused:
            self._backing.drop(self._unused.popleft())

    def close(self) -> None:
        """Wait for copies that are under way. No more may come."""
        self._read.close()
        self._write.close()

    def forget(self, stored: Sequence[StoredGroup]) -> None:
        """Take note that the tensor of these parts is gone. Called wherever it dies, so this takes no lock."""
        self._unused.extend(stored)


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a flat tensor."""
    first = int(tensor.storage_offset()) * tensor.element_size()
    return flat(tensor.untyped_storage(), first, tensor.nbytes)
