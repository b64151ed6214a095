"""Groups that are filling in one iteration: those of the plans, and those of tensors that no plan expects."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from torch_tiers.allocator.errors import TierFull
from torch_tiers.allocator.sizes import PAGE, round_up
from torch_tiers.migrator.model.plan import PageGroup, Plan
from torch_tiers.migrator.offload.engine import Engine
from torch_tiers.migrator.offload.group import NEVER, Group, State
from torch_tiers.migrator.planner.sizes import WORTH, group_bytes
from torch_tiers.migrator.streams import Stream

UNFORESEEN = 1 << 60
"""Groups that no plan orders are expected back last in, first out, and after all that a plan orders."""

PURGE = 256  # groups that wait: a loop of forwards without backward (evaluation that forgot no_grad) makes ever more


_operation = torch._C._autograd._get_sequence_nr
"""Tells operations of this thread apart, of those that save anything."""


@dataclass(slots=True)
class Open:
    """A planned group that is filling, and the number of its sites that have not been saved."""

    planned: PageGroup
    group: Group
    missing: int
    nbytes: int = 0  # that came


class Filling:
    """What fills on one device. To be used with the engine's lock.

    Parameters
    ----------
    engine : Engine
        Offloads groups once they are full.
    room : int
        Bytes of saved tensors that may lie in HBM; may be set anew at any time.

    Attributes
    ----------
    unforeseen : tuple of (int, int)
        Tensors that were saved in this iteration and that no plan knows, and their bytes that were not saved before.
    complete : tuple of (int, int)
        Bytes of the groups of which all sites came, and bytes that the plan has for them.
    granted : int
        Bytes, in whole pages, that went to the tiers below in this iteration.
    refused : bool
        Whether something was to go and stayed, as they had no room for it.
    patient : bool
        Whether what no plan has foreseen waits for this to be over, as there may be room for all of it.
    offloaded : bool
        Whether anything was offloaded in this iteration.
    loose : dict
        The groups for what no plan has foreseen, one for each stream.
    """

    def __init__(self, engine: Engine, room: int) -> None:
        self.room = room
        self.unforeseen = 0, 0
        self.complete = 0, 0
        self.granted = 0
        self.refused = False
        self.patient = self.offloaded = False
        self.loose: dict[Stream, Group] = {}
        self._full: deque[Group] = deque()  # of those, what waits to be offloaded
        self._unfilled: tuple[Group, int] | None = None  # what an operation has yet to write to, and which that is
        self._waiting: deque[tuple[Group, Callable[[Group], None]]] = (
            deque()
        )  # for their operation; and how they are offloaded
        self._purge_at = PURGE
        self._engine = engine
        self._open: dict[tuple[PageGroup, Stream], Open] = {}
        self._lacking: dict[PageGroup, int] = {}  # sites that have not come, of groups of which one has
        self._loose_made = 0

    def begin(self) -> None:
        """Start an iteration."""
        self._open.clear()
        self.loose.clear()
        self._full.clear()
        self._unfilled = None
        self._waiting.clear()
        self._purge_at = PURGE
        self._lacking.clear()
        self.unforeseen = 0, 0
        self.complete = 0, 0
        self.offloaded = False
        self.granted = 0
        self.refused = False

    def planned(self, planned: PageGroup, stream: Stream) -> Open:
        """Return the open group for a planned one; open one if there is none, or if all in it died too early."""
        filling = self._open.get((planned, stream))
        if filling is None:
            self._lacking.setdefault(planned, len(planned.sites))
            filling = Open(planned, _planned_group(planned, stream), len(planned.sites))
            self._open[planned, stream] = filling
        elif filling.group.state is State.GONE:
            filling.group = _planned_group(planned, stream)
        return filling

    def came(self, filling: Open, nbytes: int) -> None:
        """Count one more saved site of a planned group, with bytes of its own; offload the group after its last one."""
        filling.missing -= 1
        filling.nbytes += nbytes
        self._lacking[filling.planned] -= 1
        if filling.missing:
            return
        came, of_plan = self.complete
        self.complete = came + filling.nbytes, of_plan + filling.planned.nbytes
        # Groups that should have been complete before it wait for a branch that was not taken.
        planned = filling.planned
        for key in [key for key in self._open if key[0] is planned or key[0].last_birth < planned.last_birth]:
            self._offload(self._open.pop(key).group, self._offload_planned)

    def may_be_unfilled(self, group: Group) -> None:
        """Take note that the tensor just added has no `grad_fn`, so its operation may write to it after it is saved.

        RReLU's noise is such a tensor. A copy taken before that would be wrong.
        """
        self._unfilled = group, _operation()

    @property
    def waits(self) -> bool:
        """Return whether groups wait for the operation that saves something in them."""
        return bool(self._waiting)

    def offload_waiting(self, *, over: bool = False) -> None:
        """Offload groups that wait for an operation, if another one runs now, or forward is `over`."""
        if not over and self._unfilled is not None and self._unfilled[1] == _operation():
            return
        while self._waiting:  # one by one: where a tier has no room for one, the others still wait
            group, offload = self._waiting.popleft()
            offload(group)

    def loose_group(self, stream: Stream) -> Group:
        """Return the group for tensors that no plan expects."""
        group = self.loose.get(stream)
        if group is None or group.state is State.GONE:
            self._loose_made += 1
            group = self.loose[stream] = Group(UNFORESEEN - self._loose_made, stream)
        return group

    def offload_loose(self, stream: Stream) -> None:
        """Offload tensors that no plan expects, once they are worth a transfer."""
        group, worth = self.loose.get(stream), group_bytes(self.room)
        # A group that stays counts as in HBM until all of it was used. So that is one storage, where it is large.
        if group is not None and group.nbytes >= (min(WORTH, worth) if self.patient else worth):
            self._full.append(self.loose.pop(stream))
        while self._full and not self.patient:
            self._offload(self._full.popleft(), self._offload_loose)
        if len(self._full) >= self._purge_at:
            self._full = deque(group for group in self._full if group.state is not State.GONE)
            self._purge_at = max(PURGE, 2 * len(self._full))

    def _offload_planned(self, group: Group) -> None:
        try:
            self._leave(group, insist=True)
        except TierFull as full:
            self._stays(full)

    def _offload_loose(self, group: Group) -> None:
        try:
            self._leave(group)
        except TierFull as full:
            self._stays(full)

    def _stays(self, full: TierFull) -> None:
        self.refused = True
        self._engine.backing.say_what_stays(full)

    def _offload(self, group: Group, offload: Callable[[Group], None]) -> None:
        """Offload a group, or have it wait for the operation that is saving something in it."""
        if self._unfilled is not None and self._unfilled == (group, _operation()):
            self._waiting.append((group, offload))
        else:
            offload(group)

    def _leave(self, group: Group, *, insist: bool = False) -> None:
        self._engine.offload(group, insist=insist)
        if group.state in (State.LEAVING, State.AWAY):
            self.offloaded = True
            self.granted += round_up(group.nbytes, PAGE)

    def lacking(self, plans: Iterable[Plan]) -> int:
        """Return the number of expected sites that were not saved.

        If kinds of iterations alternate, one plan must fit. Groups of which nothing was saved are of other kinds.
        """
        touched = ([group for group in plan.groups if group in self._lacking] for plan in plans)
        return min((sum(max(0, self._lacking[group]) for group in groups) for groups in touched if groups), default=0)


def _planned_group(planned: PageGroup, stream: Stream) -> Group:
    next_use = NEVER if planned.first_use is None else planned.first_use
    bring_at = -1 if planned.bring_at is None else planned.bring_at
    return Group(next_use, stream, bring_at=bring_at, tier=planned.tier)
