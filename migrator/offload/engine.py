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

import threading
from collections import deque

import torch

from torch_tiers.allocator.errors import TierFull
from torch_tiers.migrator.model.timing import IterationTime
from torch_tiers.migrator.offload.backing import Backing
from torch_tiers.migrator.offload.direct import Direct
from torch_tiers.migrator.offload.direct.stored import DirectStoredGroup
from torch_tiers.migrator.offload.group import Claim, ClaimOn, Group, Saved, State, unclaimed
from torch_tiers.migrator.offload.prefetcher import Prefetcher
from torch_tiers.migrator.offload.tensors import Tensors, for_a_group
from torch_tiers.migrator.offload.transport import Transport
from torch_tiers.migrator.planner.paces import Pace
from torch_tiers.migrator.streams import Compute, Lane, Meter
from torch_tiers.migrator.telemetry.device_log import DeviceLog

EVERY = 1 << 30  # `Engine.ahead` while nothing but the room bounds it
ANY = -1, -1 << 62  # position and room, whatever these are


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
        self, compute: Compute, out: Lane, back: Lane, backing: Backing, tensors: Tensors, direct: Direct | None = None
    ) -> None:
        self.compute = compute
        self.tensors = tensors
        self.lock = threading.RLock()
        self.ahead = EVERY  # groups that may be back before backward asks for the first of them
        self.iteration_time: IterationTime | None = None  # what the last iteration took that the device is through with
        self._peak = 0
        self.alive = 0  # claims: groups that are still part of a graph
        self._again: Group | None = None  # the last one that came back a second time
        self._in_hbm: dict[Group, None] = {}  # all with bytes in `hbm.resident`
        self.dead: deque[ClaimOn] = deque()
        self._dying: deque[Group] = deque()  # that no graph holds, and that a thread may still ask a lane to copy
        self.meter: Meter | None = None  # of the iteration under way, if it is recorded
        self.backing = backing
        self._transport = Transport(compute, out, back, backing, tensors, direct)
        self._prefetcher = Prefetcher(compute, backing, self._transport)
        self._leaving: dict[Group, None] = {}  # in the order in which their copies end
        self._waiting: dict[Group, None] = {}  # not in HBM, or leaving it; in the order of creation
        self.hbm = tensors.Occupancy(self._leaving, self._prefetcher.order)
        self.unsettled = True  # a look at what may come back next could find something new

    def tell(self, log: DeviceLog) -> None:
        """Have the device's log told of groups and iterations from now on."""
        self._transport.log = log

    # -------------------------------------------------------------------------------------- out

    def add(self, group: Group, tensor: torch.Tensor, low: int, nbytes: int) -> Saved:
        """Add `nbytes` bytes of a tensor's storage, from byte `low` on, to a group that is filling."""
        saved = self.tensors.Saved(group, tensor, low, nbytes)
        if not group.counted:
            self._in_hbm[group] = None
        group.members.append(saved)
        group.nbytes += nbytes
        group.counted += nbytes
        self.hbm.resident += nbytes
        if self.hbm.resident > self._peak:
            self._peak = self.hbm.resident
        if self.hbm.resident > self.hbm.limit and self._leaving:
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

    @for_a_group
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
        self._transport.offload(group, insist=insist)
        self._transport.log.saved(self, self.hbm.resident)  # before something is released, and after
        self._leaving[group] = None
        self._waiting[group] = None
        self.backing.users.add(self)
        self.relieve()

    def relieve(self) -> None:
        """Release groups whose copy has been submitted until the rest is within the limit."""
        with self.lock:
            if self._leaving and self.compute.capturing():
                return
            before = self.hbm.resident
            while self.hbm.resident > self.hbm.limit and self._leaving:
                self._release(next(iter(self._leaving)))
            if self.meter is not None and self.hbm.resident < before:
                # Told once: after the first of several the program may still hold what left, as if it were its own.
                self.meter.part(before + self.hbm.used_up)

    def over_limit(self) -> bool:
        """Return whether more than the limit is in HBM, and no copy under way will change that."""
        return self.hbm.resident > self.hbm.limit and not self._leaving

    @for_a_group
    def _release(self, group: Group) -> None:
        released = self._transport.release(group)
        del self._leaving[group]
        if released:
            self._count(group, 0)
            return
        self._waiting.pop(group, None)
        try:
            self._transport.offload_after_all(group)
        except TierFull as full:
            self.backing.say_what_stays(full)
            return
        self._leaving[group] = self._waiting[group] = None

    # ------------------------------------------------------------------------------------- back

    def begin_backward(self) -> None:
        """Fix the order in which groups are prefetched, and start to prefetch."""
        with self.lock:
            self.collect()
            self._peak = max(self._peak, self.hbm.resident)
            self._unsettle()  # what was due is no more, also where what follows raises
            self._prefetcher.begin(self._waiting)
            self.prefetch()

    def prefetch(self) -> None:
        """Prefetch groups in order, as far as the limit allows; read those after them ahead from disk.

        Disks and the program may also make room, which the engine does not see. So it tries again whenever a group is
        first or last asked for, or dies, and with disks at every tensor; else at those after which the next may come.
        """
        hbm, order = self.hbm, self._prefetcher.order
        with self.lock:
            self.unsettled = self.backing.has_disk
            while order:
                group = self._prefetcher.bring_next(hbm.position, hbm.limit - hbm.resident, self.ahead)
                if group is None:
                    break
                self._count(group, group.nbytes)
            hbm.due_at, hbm.due_bytes = ANY if self.unsettled or not order else (order[0].bring_at, order[0].nbytes)

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
                    self._transport.leave_home(self._again)
                self._again = group
            self._bring(group)
            self._unsettle()
        if group in self._prefetcher.early:
            del self._prefetcher.early[group]
            self._unsettle()
        return self._transport.make_ready(group)

    def glimpse(self, saved: Saved) -> torch.Tensor | None:
        """Return the same buffer without side effects on which groups are in HBM, and when.

        A group that is away is copied to a buffer of its own, which the present stream may read at once.
        """
        group = saved.group
        if group.state in (State.FILLING, State.LEAVING):
            return None
        if group.state is not State.AWAY:
            return self._transport.make_ready(group)
        self._transport.fetch(group)  # and there it stays if this is interrupted: the lane may still write to it
        buffer = self._transport.make_ready(group)
        self._transport.leave_home(group)
        return buffer

    def used(self, group: Group) -> None:
        """Count the first use of one more tensor of the group by backward."""
        group.unused -= 1
        if group.unused == 0:
            # Whoever asked holds the buffer, or the program's memory, until it is done with it. Should
            # it be asked for again (retain_graph), an AWAY group comes back a second time.
            self.hbm.used_up += group.counted
            self._count(group, 0)
            self._unsettle()
            if group.state is State.HOME:
                self._transport.leave_home(group)

    def _unsettle(self) -> None:
        """Have the next tensor that is asked for look again at what may come back."""
        self.unsettled = True
        self.hbm.due_at, self.hbm.due_bytes = ANY

    def _bring(self, group: Group) -> None:
        self._transport.fetch(group)
        if group.unused:
            self._count(group, group.nbytes)

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
                self._unsettle()
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
        self._prefetcher.early.pop(group, None)
        if self._again is group:
            self._again = None
        self._transport.forget(group)

    def _count(self, group: Group, nbytes: int) -> None:
        self.hbm.resident += nbytes - group.counted
        group.counted = nbytes
        if nbytes:
            self._in_hbm[group] = None
        else:
            self._in_hbm.pop(group, None)
        if self.hbm.resident > self._peak:
            self._peak = self.hbm.resident
        self._transport.log.saved(self, self.hbm.resident)

    def enter(self, nbytes: int, pace: Pace | None = None) -> None:
        """Count bytes that were saved and stay in HBM, and a site of the plan; see `Occupancy.enter`."""
        if self.hbm.enter(nbytes, pace):
            self.relieve()

    def leave(self, nbytes: int, pace: Pace | None = None) -> None:
        """Count bytes that had stayed and were used for the last time, and a site; see `Occupancy.leave`."""
        if self.hbm.leave(nbytes, pace):
            self.prefetch()

    def end_iteration(self) -> int:
        """Return the highest use of the device in the iteration, in bytes, and count HBM afresh.

        Bytes that stayed were only ever estimated, and are gone by now.
        """
        self.collect()
        self.iteration_time = self.compute.settle()
        peak = self.compute.peak(self._peak)
        self.hbm.stayed = self.hbm.used_up = 0
        self.hbm.resident = self._peak = sum(group.counted for group in self._in_hbm)
        self._transport.log.iteration_over(self, peak, self.hbm.resident)
        return peak
