"""Staging slots between HBM and a drive: GPU memory that is registered with cuFile once, and never remapped.

Pages of our own allocator are remapped while the program runs, so they must never be registered. A group is copied
into a slot, or out of it, and only the slot meets the drive.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable

import torch

from torch_tiers.allocator.errors import TiersError
from torch_tiers.allocator.nvme.backend import BLOCK
from torch_tiers.allocator.nvme.device import DeviceMemory
from torch_tiers.allocator.sizes import format_size, round_up

log = logging.getLogger("tiers")

Registrar = Callable[[torch.Tensor], None]


class Ring:
    """A fixed number of slots, in one allocation. Thread-safe.

    A forked child has no slots, and makes no call to CUDA to find out.

    Parameters
    ----------
    device
        Whose memory it is. On a GPU it comes from the driver, outside PyTorch's allocator and ours.
    slots
        How many are wanted; there are fewer where the GPU has no room for them.
    nbytes
        Bytes of a slot, rounded up to whole 4 KiB.
    register, deregister
        Called with all of the memory at once: after it was taken, and before it is freed.

    Raises
    ------
    TiersError
        If there is no room for one slot, or the memory cannot be registered.
    """

    def __init__(
        self,
        device: torch.device,
        slots: int,
        nbytes: int,
        register: Registrar | None = None,
        deregister: Registrar | None = None,
    ) -> None:
        if slots <= 0 or nbytes <= 0:
            raise ValueError(f"a ring needs slots of some bytes, not {slots} of {nbytes}")
        self.slot_bytes = round_up(nbytes, BLOCK)
        self._memory, self.slots = _take_memory(device, slots, self.slot_bytes)
        self._deregister = deregister
        whole = self._memory.tensor
        if register is not None:
            try:
                register(whole)
            except Exception as error:
                self._memory.free()
                raise TiersError(f"a ring of {format_size(whole.numel())} cannot be registered: {error}") from error
        self._nbytes, self._address = whole.numel(), whole.data_ptr()
        first = -self._address % BLOCK
        starts = range(first, first + self.slots * self.slot_bytes, self.slot_bytes)
        self._free = deque(whole[start : start + self.slot_bytes] for start in starts)
        self._taken: set[int] = set()  # addresses
        self._closed = False
        self._freed = False
        self._changed = threading.Condition()
        _open.add(self)

    @property
    def nbytes_total(self) -> int:
        """Bytes that it takes of the device."""
        return self._nbytes

    def holds(self, block: torch.Tensor) -> bool:
        """Whether `block` lies in it."""
        return 0 <= block.data_ptr() - self._address < self._nbytes

    def take(self) -> torch.Tensor:
        """Wait until a slot is free, and take it: flat uint8, its address a multiple of 4 KiB.

        Raises
        ------
        TiersError
            If the ring is closed, or is closed meanwhile.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._closed)
            if self._closed:
                raise TiersError("the staging slots are gone: their ring is closed, as it is in a forked process")
            slot = self._free.popleft()
            self._taken.add(slot.data_ptr())
            return slot

    def give(self, slot: torch.Tensor) -> None:
        """Return a slot that nothing uses any more.

        Raises
        ------
        ValueError
            If it is not taken.
        """
        with self._changed:
            if slot.data_ptr() not in self._taken or slot.numel() != self.slot_bytes:
                raise ValueError(f"{slot.data_ptr():#x} is no slot that was taken from this ring")
            self._taken.remove(slot.data_ptr())
            self._free.append(slot)
            self._changed.notify_all()
        self._free_if_unused()

    def drain(self) -> None:
        """Wait until all slots are back, or the ring is closed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken or self._closed)

    def close(self) -> None:
        """Refuse whoever asks for a slot from now on, and free the memory once all slots are back. Idempotent.

        A slot that is never returned may be in use by a drive that does not answer: its memory is not freed.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._free_if_unused()

    def abandon(self) -> None:
        """Forget everything, in the child of a fork: the memory and its registration are the parent's."""
        self._changed = threading.Condition()  # another thread of the parent may have held the old one
        self._closed = self._freed = True
        self._free.clear()
        self._taken.clear()

    def _free_if_unused(self) -> None:
        with self._changed:
            if self._freed or not self._closed or self._taken:
                return
            self._freed = True
            self._free.clear()
        if self._deregister is not None:
            try:
                self._deregister(self._memory.tensor)
            except Exception as error:  # to free what is registered can hang the driver
                log.warning("%s of staging slots are not freed: %s", format_size(self._nbytes), error)
                return
        self._memory.free()


class _HostMemory:
    """Host memory, where there is no GPU."""

    def __init__(self, nbytes: int) -> None:
        whole = torch.empty(nbytes + BLOCK, dtype=torch.uint8)
        first = -whole.data_ptr() % BLOCK
        self.tensor = whole[first : first + nbytes]

    def free(self) -> None:
        self.tensor = self.tensor[:0].clone()


def _take_memory(device: torch.device, slots: int, nbytes: int) -> tuple[DeviceMemory | _HostMemory, int]:
    """Memory for as many slots as there is room for, and their number."""
    if device.type != "cuda":
        return _HostMemory(slots * nbytes), slots
    for count in range(slots, 0, -1):
        try:
            memory = DeviceMemory(device, count * nbytes + BLOCK)  # the driver promises less than 4 KiB
        except MemoryError:
            continue
        if count < slots:
            log.warning("%s has room for %d of %d staging slots of %s", device, count, slots, format_size(nbytes))
        return memory, count
    raise TiersError(f"{device} has no room for one staging slot of {format_size(nbytes)}: lower TIERS_HBM")


_open: weakref.WeakSet[Ring] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for ring in list(_open):
        ring.abandon()


os.register_at_fork(after_in_child=_after_fork_in_child)
