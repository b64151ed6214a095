"""The transport: copies groups out of HBM and back, by way of DRAM or past it.

It knows one group at a time. Which ones move, and when, the engine says.
"""

from __future__ import annotations

import time

import torch

from torch_tiers.migrator.offload.backing import Backing
from torch_tiers.migrator.offload.direct import Direct
from torch_tiers.migrator.offload.direct.stored import DirectStoredGroup, Source
from torch_tiers.migrator.offload.group import Group, State
from torch_tiers.migrator.offload.tensors import Tensors, for_a_group
from torch_tiers.migrator.streams import Compute, Event, Lane, Stream
from torch_tiers.migrator.streams.pieces import Leaving, whole
from torch_tiers.migrator.streams.promised import PromisedEvent
from torch_tiers.migrator.telemetry.counters import Counters
from torch_tiers.migrator.telemetry.device_log import DeviceLog


class Transport:
    """Copies groups of one device. The parameters are those of `Engine`."""

    def __init__(
        self, compute: Compute, out: Lane, back: Lane, backing: Backing, tensors: Tensors, direct: Direct | None
    ) -> None:
        self.tensors = tensors
        self._compute = compute
        self._out = out
        self._back = back
        self._backing = backing
        self._direct = direct
        self.log = DeviceLog(str(compute.device), Counters())  # until the engine is told of another

    def offload(self, group: Group, *, insist: bool) -> None:
        """Start to copy a group that is FILLING out of HBM; `insist` as in `Backing.new`.

        Raises
        ------
        TierFull
            If no tier has room; the group is then as it was.
        """
        begin, nbytes = time.perf_counter(), self.tensors.arrange(group.members)
        if group.tier == "nvme" and self._direct is not None:
            sources = [
                Source(saved.offset, saved.alias.untyped_storage(), saved.low, saved.nbytes) for saved in group.members
            ]
            group.stored = self._direct.offload(nbytes, sources, (self._compute.mark(group.stream),))
        if group.stored is None:
            self._offload_through_dram(group, nbytes, insist=insist)
        group.state = State.LEAVING
        group.told = self.log.offloaded(nbytes, begin)

    def _offload_through_dram(self, group: Group, nbytes: int, *, insist: bool) -> None:
        stored = self._backing.new(nbytes, group.next_use, group.tier, insist=insist)
        assert stored.block is not None
        leaving = Leaving(group.members, stored.block.tensor, group.nbytes, self.tensors.spans)
        try:
            stored.filled = self._out.copy(leaving, stored.after, group.stream)
        except BaseException:
            self._backing.drop(stored)
            raise
        self._backing.filled(stored)
        group.stored = stored

    def release(self, group: Group) -> bool:
        """Release the program's memory of a group that is LEAVING, for what its stream runs after the copy.

        Returns
        -------
        bool
            False if the bytes are still in HBM, as a direct transfer failed: see `offload_after_all`.
        """
        stored = group.stored
        assert stored is not None and stored.filled is not None
        try:
            self._wait(stored.filled, "d2h", group.stream)
        except Exception as error:
            if not isinstance(stored, DirectStoredGroup) or self._direct is None:
                raise
            self._direct.say_failed(error)
            return False
        self.tensors.release(group.members)
        group.members.clear()
        group.state = State.AWAY
        return True

    def offload_after_all(self, group: Group) -> None:
        """Start to copy a group to DRAM whose direct transfer failed.

        Raises
        ------
        TierFull
            If DRAM has no room; the group is then FILLING again.
        """
        begin, stored, group.stored = time.perf_counter(), group.stored, None
        assert isinstance(stored, DirectStoredGroup) and self._direct is not None
        group.state = State.FILLING
        self._direct.drop(stored)
        self._offload_through_dram(group, stored.nbytes, insist=False)
        group.state = State.LEAVING
        group.told = self.log.offloaded(stored.nbytes, begin)

    @for_a_group
    def fetch(self, group: Group) -> None:
        """Start to copy a group that is AWAY into a buffer of the present stream."""
        begin, stored, group.stream = time.perf_counter(), group.stored, self._compute.stream()
        assert stored is not None
        buffer = self._compute.empty(stored.nbytes)
        if isinstance(stored, DirectStoredGroup):
            assert self._direct is not None
            self._direct.read(stored, buffer, (self._compute.mark(group.stream),))
        else:
            after, stream = () if stored.filled is None else (stored.filled,), group.stream
            self._backing.lend(stored, lambda block: self._back.copy([whole(buffer, block.tensor)], after, stream))
        group.buffer, group.ready_on = buffer, []
        group.state = State.HOME
        self.log.prefetched(group.told, stored.nbytes, begin)

    def make_ready(self, group: Group) -> torch.Tensor:
        """Return the buffer of a group that is HOME, once the present stream may read it."""
        assert group.buffer is not None and group.stored is not None and group.stored.returned is not None
        stream = self._compute.stream()
        if stream not in group.ready_on:
            self._wait(group.stored.returned, "h2d", stream)
            group.ready_on.append(stream)
            if stream != group.stream:
                self._compute.hand_over(group.buffer)
        return group.buffer

    def leave_home(self, group: Group) -> None:
        """Free the buffer of a group that is HOME; it is AWAY again."""
        if group.stream not in group.ready_on and group.stored is not None and group.stored.returned is not None:
            # The lane may still write into the buffer; the stream that gets this memory next must not.
            returned = group.stored.returned
            event = returned.settled() if isinstance(returned, PromisedEvent) else returned
            if event is not None:
                self._wait(event, "h2d", group.stream)
        group.buffer = None
        group.state = State.AWAY

    def forget(self, group: Group) -> None:
        """Free all that a group has, in HBM and below, also while it is copied; it is GONE."""
        try:
            if group.state is State.HOME:
                self.leave_home(group)
            elif group.state is State.LEAVING and group.stored is not None and group.stored.filled is not None:
                filled = group.stored.filled
                event = filled.settled() if isinstance(filled, PromisedEvent) else filled
                if event is not None:
                    self._compute.outlast(event, group.stream)
        finally:  # Ctrl-C, for one
            group.buffer = None
            self.tensors.release(group.members)  # which the iteration's list of storages knows until its end
            group.members.clear()
            group.state = State.GONE
            stored, group.stored = group.stored, None
            if isinstance(stored, DirectStoredGroup):
                assert self._direct is not None
                self._direct.drop(stored)
            elif stored is not None:
                self._backing.drop(stored)

    def _wait(self, event: Event | PromisedEvent, cause: str, stream: Stream) -> None:
        """Let `stream` continue only after `event`; block the host until the event exists."""
        self._compute.wait(event, event.lane if isinstance(event, PromisedEvent) else cause, stream)
