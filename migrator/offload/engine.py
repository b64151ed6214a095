"""The engine: offloads groups of saved storages from HBM and prefetches them. It executes plans and decides nothing.

HBM is released in *stream order*: the compute stream waits for the copy's event, then the references are dropped. So
the caching allocator may hand the memory out again at once, to work that the stream runs after the copy. The host does
not wait. Memory is released late, only when the room is needed: a group that is still here when backward begins need
not come back.

A group is prefetched as soon as there is room, in the order of first uses. Its buffer is allocated on the compute
stream and filled on the lane. The lane first waits for all the work that the stream was given before, as the memory may
be in use until then.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any, TypeVar, cast

import torch

from torch_tiers.allocator.errors import TierFull
from torch_tiers.migrator.model.plan import READ_AHEAD
from torch_tiers.migrator.model.timing import HookTime, IterationTime
from torch_tiers.migrator.offload.backing import Backing
from torch_tiers.migrator.offload.direct import Direct
from torch_tiers.migrator.offload.direct.stored import DirectStoredGroup, Source
from torch_tiers.migrator.offload.group import NEVER, Claim, ClaimOn, Group, Saved, State, unclaimed
from torch_tiers.migrator.offload.stored import StoredGroup
from torch_tiers.migrator.offload.tensors import Tensors
from torch_tiers.migrator.planner.paces import Pace
from torch_tiers.migrator.streams import Compute, Event, Lane, Meter, Stream
from torch_tiers.migrator.streams.pieces import Leaving, whole
from torch_tiers.migrator.streams.promised import PromisedEvent

EVERY = 1 << 30  # `Engine.ahead` while nothing but the room bounds it
_GROUPS = HookTime._fields.index("groups")

Method = TypeVar("Method", bound=Callable[..., None])


def _for_a_group(method: Method) -> Method:
    """Count the host's time in a method as spent for a group, not for the tensor whose hook called it."""

    @functools.wraps(method)
    def charged(self: Engine, *args: Any, **kwargs: Any) -> None:
        before = self.tensors.charge(_GROUPS)
        try:
            method(self, *args, **kwargs)
        finally:
            self.tensors.charge(before)

    return cast("Method", charged)


class Engine:
    """Offloads and prefetches the groups of one device.

    Parameters
    ----------
    compute, out, back
        The program's stream, and the two lanes.
    backing : Backing
        Stores groups in DRAM and on NVMe.
    tensors : Tensors
        The C++ part of the hooks, as far as it knows groups.
    direct : Direct, optional
        The path to NVMe past host memory, if there is one, for groups whose plan says ``"nvme"``.
    """

    def __init__(
        self,
        compute: Compute,
        out: Lane,
        back: Lane,
        backing: Backing,
        tensors: Tensors,
        direct: Direct | None = None,
    ) -> None:
        self.compute = compute
        self.tensors = tensors
        self.lock = threading.RLock()
        self.limit = 0
        self.position = -1  # in the plan's iteration, as far as the sites that came tell
        self.ahead = EVERY  # groups that may be back before backward asks for the first of them
        self._early: dict[Group, None] = {}  # those that are
        self.iteration_time: IterationTime | None = None  # what the last iteration took that the device is through with
        self.resident = 0
        self.used_up = 0  # bytes that left `resident` at their last use, when somebody begins to work with them
        self._peak = 0
        self.alive = 0  # claims: groups that are still part of a graph
        self._stayed = 0
        self._again: Group | None = None  # the last one that came back a second time
        self._in_hbm: dict[Group, None] = {}  # all with bytes in `resident`
        self.dead: deque[ClaimOn] = deque()
        self._dying: deque[Group] = deque()  # that no graph holds, and that a thread may still ask a lane to copy
        self.meter: Meter | None = None  # of the iteration under way, if it is recorded
        self._out = out
        self._back = back
        self.backing = backing
        self._direct = direct
        self._leaving: dict[Group, None] = {}  # in the order in which their copies end
        self._waiting: dict[Group, None] = {}  # not in HBM, or leaving it; in the order of creation
        self._order: deque[Group] = deque()
        self.unsettled = True  # a look at what may come back next could find something new

    # -------------------------------------------------------------------------------------- out

    def add(self, group: Group, tensor: torch.Tensor, low: int, nbytes: int) -> Saved:
        """Add `nbytes` bytes of a tensor's storage, from byte `low` on, to a group that is filling."""
        saved = self.tensors.Saved(group, tensor, low, nbytes)
        if not group.counted:
            self._in_hbm[group] = None
        group.members.append(saved)
        group.nbytes += nbytes
        group.counted += nbytes
        self.resident += nbytes
        if self.resident > self._peak:
            self._peak = self.resident
        if self.resident > self.limit and self._leaving:
            self.relieve()  # others, at once: this group may take long to fill
        return saved

    def hold(self, saved: Saved) -> Claim:
        """Count one more tensor of the graph on `saved`; return the claim on the group that the graph is to hold."""
        group = saved.group
        group.unused += 1
        claim = group.claim()
        if claim is None:
            claim = Claim()
            group.claim = on = ClaimOn(claim, self.dead.append)
            on.group = group
            group.claims += 1
            self.alive += 1
        return claim

    @_for_a_group
    def offload(self, group: Group, *, insist: bool = False) -> None:
        """Start to copy the group out of HBM; `insist` as in `Backing.new`.

        Raises
        ------
        TierFull
            If no tier has room; the group then stays where it is.
        """
        self.collect()
        self._collect_for_others()
        if group.state is not State.FILLING or not group.members:
            return
        nbytes = self.tensors.arrange(group.members)
        if group.tier != "nvme" or not self._offload_directly(group, nbytes):
            self._offload_through_dram(group, nbytes, insist=insist)
        group.state = State.LEAVING
        self._leaving[group] = None
        self._waiting[group] = None
        self.backing.users.add(self)
        self.relieve()

    def _offload_directly(self, group: Group, nbytes: int) -> bool:
        """Start to write the group to NVMe past DRAM; return False if there is no such path, or no room."""
        if self._direct is None:
            return False
        sources = [
            Source(saved.offset, saved.alias.untyped_storage(), saved.low, saved.nbytes) for saved in group.members
        ]
        stored = self._direct.offload(nbytes, sources, (self.compute.mark(group.stream),))
        if stored is not None:
            group.stored = stored
        return stored is not None

    def _offload_through_dram(self, group: Group, nbytes: int, *, insist: bool) -> None:
        stored = self.backing.new(nbytes, group.next_use, group.tier, insist=insist)
        assert stored.block is not None
        leaving = Leaving(group.members, stored.block.tensor, group.nbytes, self.tensors.spans)
        try:
            stored.filled = self._out.copy(leaving, stored.after, group.stream)
        except BaseException:
            self.backing.drop(stored)
            raise
        self.backing.filled(stored)
        group.stored = stored

    def relieve(self) -> None:
        """Release groups whose copy has been submitted until the rest is within the limit."""
        if self._leaving and self.compute.capturing():
            return
        before = self.resident
        while self.resident > self.limit and self._leaving:
            self._release(next(iter(self._leaving)))
        if self.meter is not None and self.resident < before:
            # Told once: after the first of several the program may still hold what left, as if it were its own.
            self.meter.part(before + self.used_up)

    def over_limit(self) -> bool:
        """Return whether more than the limit is in HBM, and no copy under way will change that."""
        return self.resident > self.limit and not self._leaving

    @_for_a_group
    def _release(self, group: Group) -> None:
        stored = group.stored
        assert stored is not None and stored.filled is not None
        try:
            self._wait(stored.filled, "d2h", group.stream)
        except Exception as error:  # the bytes are still in HBM
            if not isinstance(stored, DirectStoredGroup):
                raise
            self._offload_through_dram_after_all(group, stored, error)
            return
        del self._leaving[group]
        self.tensors.release(group.members)
        group.members.clear()
        group.state = State.AWAY
        self._count(group, 0)

    def _offload_through_dram_after_all(self, group: Group, stored: DirectStoredGroup, error: Exception) -> None:
        """Copy a group to DRAM, as its direct transfer failed; keep it in HBM if DRAM has no room."""
        assert self._direct is not None
        self._direct.say_failed(error)
        del self._leaving[group]
        self._waiting.pop(group, None)
        group.state, group.stored = State.FILLING, None
        self._direct.drop(stored)
        try:
            self._offload_through_dram(group, stored.nbytes, insist=False)
        except TierFull as full:
            self.backing.say_what_stays(full)
            return
        group.state = State.LEAVING
        self._leaving[group] = self._waiting[group] = None

    # ------------------------------------------------------------------------------------- back

    def begin_backward(self) -> None:
        """Fix the order in which groups are prefetched, and start to prefetch."""
        with self.lock:
            self.collect()
            self._peak = max(self._peak, self.resident)
            needed = (group for group in self._waiting if group.next_use != NEVER)
            self._order = deque(sorted(needed, key=lambda group: group.next_use))
            self._early.clear()
            self.prefetch()

    def prefetch(self) -> None:
        """Prefetch groups in order, as far as the limit allows; read those after them ahead from disk.

        Disks and the program may also make room, which the engine does not see. So it tries again whenever a group is
        first or last asked for, or dies, and with disks at every tensor.
        """
        self.unsettled = self.backing.has_disk
        while self._order:
            group = self._order[0]
            if group.state is State.AWAY and group.unused and not self._bring_early(group):
                break
            self._order.popleft()
        if self.backing.has_disk and self._order and not self.compute.capturing():
            for group in islice(self._order, min(READ_AHEAD, self.ahead)):
                stored = group.stored
                if (
                    isinstance(stored, StoredGroup)
                    and group.state is State.AWAY
                    and not self.backing.read_ahead(stored)
                ):
                    break

    def _bring_early(self, group: Group) -> bool:
        """Prefetch a group if there is room for it; return whether it comes."""
        assert group.stored is not None
        if group.bring_at > self.position or self.resident + group.nbytes > self.limit:
            return False
        if len(self._early) >= self.ahead or self.compute.capturing():
            return False
        if isinstance(group.stored, StoredGroup) and not self.backing.at_hand(group.stored):
            return False
        try:
            self._bring(group)
        except torch.OutOfMemoryError:
            return False  # nobody needs it yet; by then there may be room
        self._early[group] = None
        return True

    def source(self, saved: Saved) -> torch.Tensor | None:
        """Return the buffer on which `saved` lies, ready for the compute stream; None if it never left HBM.

        Raises
        ------
        StoreError
            If the disk does not return what was written.
        """
        group = saved.group
        if group.state in (State.FILLING, State.LEAVING):
            return None
        if group.state is State.AWAY:
            if not group.unused:
                # Asked for again (retain_graph), and nobody can say how often: one such group at a time.
                if self._again is not None and self._again.state is State.HOME:
                    self._leave_home(self._again)
                self._again = group
            self._bring(group)
            self.unsettled = True
        if group in self._early:
            del self._early[group]
            self.unsettled = True
        return self._make_ready(group)

    def glimpse(self, saved: Saved) -> torch.Tensor | None:
        """Return the same buffer without side effects on which groups are in HBM, and when.

        A group that is away is copied to a buffer of its own, which the present stream may read at once.
        """
        group = saved.group
        if group.state in (State.FILLING, State.LEAVING):
            return None
        if group.state is not State.AWAY:
            return self._make_ready(group)
        self._fetch(group)  # and there it stays if this is interrupted: the lane may still write to it
        buffer = self._make_ready(group)
        self._leave_home(group)
        return buffer

    def used(self, group: Group) -> None:
        """Count the first use of one more tensor of the group by backward."""
        group.unused -= 1
        if group.unused == 0:
            # Whoever asked holds the buffer, or the program's memory, until it is done with it. Should
            # it be asked for again (retain_graph), an AWAY group comes back a second time.
            self.used_up += group.counted
            self._count(group, 0)
            self.unsettled = True
            if group.state is State.HOME:
                self._leave_home(group)

    def _bring(self, group: Group) -> None:
        self._fetch(group)
        if group.unused:
            self._count(group, group.nbytes)

    @_for_a_group
    def _fetch(self, group: Group) -> None:
        assert group.stored is not None
        group.stream = self.compute.stream()
        group.buffer = self._copy_back(group.stored, group.stream)
        group.ready_on = []
        group.state = State.HOME

    def _make_ready(self, group: Group) -> torch.Tensor:
        """Return the buffer of a group that is HOME, once the present stream may read it."""
        assert group.buffer is not None and group.stored is not None and group.stored.returned is not None
        stream = self.compute.stream()
        if stream not in group.ready_on:
            self._wait(group.stored.returned, "h2d", stream)
            group.ready_on.append(stream)
            if stream != group.stream:
                self.compute.hand_over(group.buffer)
        return group.buffer

    def _copy_back(self, stored: StoredGroup | DirectStoredGroup, stream: Stream) -> torch.Tensor:
        """Copy a stored group to a new buffer of `stream`; `StoredGroup.returned` is the event of its arrival."""
        buffer = self.compute.empty(stored.nbytes)
        if isinstance(stored, DirectStoredGroup):
            assert self._direct is not None
            self._direct.read(stored, buffer, (self.compute.mark(stream),))
            return buffer
        after = () if stored.filled is None else (stored.filled,)
        self.backing.lend(stored, lambda block: self._back.copy([whole(buffer, block.tensor)], after, stream))
        return buffer

    def _wait(self, event: Event | PromisedEvent, cause: str, stream: Stream) -> None:
        """Let `stream` continue only after `event`; block the host until the event exists."""
        self.compute.wait(event, event.lane if isinstance(event, PromisedEvent) else cause, stream)

    def _leave_home(self, group: Group) -> None:
        if group.stream not in group.ready_on and group.stored is not None and group.stored.returned is not None:
            # The lane may still write into the buffer; the stream that gets this memory next must not.
            returned = group.stored.returned
            event = returned.settled() if isinstance(returned, PromisedEvent) else returned
            if event is not None:
                self._wait(event, "h2d", group.stream)
        group.buffer = None
        group.state = State.AWAY

    # ------------------------------------------------------------------------------------- ends

    def collect(self) -> None:
        """Forget groups that no graph refers to any more."""
        while self.dead:
            group = self.dead.popleft().group
            self.alive -= 1
            group.claims -= 1
            if group.claims == 0:
                group.claim = unclaimed  # which holds the group
                self._waiting.pop(group, None)
                self._dying.append(group)
                if isinstance(group.stored, DirectStoredGroup):
                    group.stored.dropped = True  # so that the rest of it is not written
        for _ in range(len(self._dying)):
            group = self._dying.popleft()
            if isinstance(group.stored, DirectStoredGroup) and not group.stored.is_asked_for:
                self._dying.append(group)  # to wait for the thread would have the program wait
            else:
                self._forget(group)
                self.unsettled = True
        if not (self._waiting or self._dying):
            self.backing.users.discard(self)

    def _collect_for_others(self) -> None:
        """Have other engines forget dead groups: their threads may have ended, or idle."""
        if self.compute.capturing():
            return
        for other in tuple(self.backing.users):
            # Two may look at each other: neither waits.
            if other is not self and other.dead and other.lock.acquire(blocking=False):
                try:
                    other.collect()
                finally:
                    other.lock.release()

    def _forget(self, group: Group) -> None:
        self._count(group, 0)
        self._waiting.pop(group, None)
        self._leaving.pop(group, None)
        self._early.pop(group, None)
        if self._again is group:
            self._again = None
        try:
            if group.state is State.HOME:
                self._leave_home(group)
            elif group.state is State.LEAVING and group.stored is not None and group.stored.filled is not None:
                filled = group.stored.filled
                event = filled.settled() if isinstance(filled, PromisedEvent) else filled
                if event is not None:
                    self.compute.outlast(event, group.stream)
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
                self.backing.drop(stored)

    def _count(self, group: Group, nbytes: int) -> None:
        self.resident += nbytes - group.counted
        group.counted = nbytes
        if nbytes:
            self._in_hbm[group] = None
        else:
            self._in_hbm.pop(group, None)
        if self.resident > self._peak:
            self._peak = self.resident

    def entered(self, nbytes: int) -> None:
        """Count bytes that were saved and stay in HBM.

        This is called for every tensor that stays, and so takes no lock. If two threads meet here, the count is off
        until the iteration ends, and so is the time at which groups leave or come back.
        """
        self._stayed += nbytes
        self.resident += nbytes
        if self.resident > self.limit and self._leaving:
            with self.lock:
                self.relieve()

    def born(self, pace: Pace) -> None:
        """Take note that a site of the plan was saved; its limit holds from here on."""
        self.position = pace.birth
        if pace.from_birth is not None:
            self.limit = pace.from_birth
            if self.resident > self.limit and self._leaving:
                with self.lock:
                    self.relieve()

    def reached(self, pace: Pace) -> None:
        """Take note that backward asks for a site of the plan; its limit and its prefetches hold from here on."""
        if pace.use <= self.position:
            return  # asked for again, or not in the plan's order
        self.position = pace.use
        if pace.from_use is not None:
            self.limit = pace.from_use
        if self._order:
            with self.lock:
                self.prefetch()

    def left(self, nbytes: int) -> None:
        """Count bytes that had stayed and were used for the last time."""
        # What is unpacked twice (retain_graph) leaves twice by this count, but never more than had stayed.
        nbytes = min(nbytes, self._stayed)
        self._stayed -= nbytes
        self.resident -= nbytes
        self.used_up += nbytes
        if self._order:
            with self.lock:
                self.prefetch()

    def end_iteration(self) -> int:
        """Return the highest use of the device in the iteration, in bytes, and count HBM afresh.

        Bytes that stayed were only ever estimated, and are gone by now.
        """
        self.collect()
        self.iteration_time = self.compute.settle()
        peak = self.compute.peak(self._peak)
        self._stayed = 0
        self.resident = self._peak = sum(group.counted for group in self._in_hbm)
        return peak
