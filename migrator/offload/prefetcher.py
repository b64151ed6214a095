"""The prefetcher: brings groups back before backward asks for them, in the order of first uses."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

import torch

from torch_tiers.migrator.model.plan import READ_AHEAD
from torch_tiers.migrator.offload.backing import Backing
from torch_tiers.migrator.offload.group import NEVER, Group, State
from torch_tiers.migrator.offload.stored import StoredGroup
from torch_tiers.migrator.offload.transport import Transport
from torch_tiers.migrator.streams import Compute


class Prefetcher:
    """Prefetches the groups of one device. It counts no bytes: whoever calls it says what room there is.

    Attributes
    ----------
    order : deque of Group
        Those that are still to come back.
    early : dict
        Those that are back, and for which backward has not asked.
    """

    def __init__(self, compute: Compute, backing: Backing, transport: Transport) -> None:
        self.order: deque[Group] = deque()
        self.early: dict[Group, None] = {}
        self._compute = compute
        self._backing = backing
        self._transport = transport

    def begin(self, groups: Iterable[Group]) -> None:
        """Backward begins; fix the order in which `groups` come back, as far as it will ask for them."""
        needed = (group for group in groups if group.next_use != NEVER)
        self.order.clear()  # the same deque: hooks look whether there is any
        self.order.extend(sorted(needed, key=lambda group: group.next_use))
        self.early.clear()

    def bring_next(self, position: int, room: int, most: int) -> Group | None:
        """Have the next group come back and return it, if it may; else read those to come ahead from disk.

        None comes before the plan's `position` is that from which it may, nor beyond `room` bytes, and no more than
        `most` are early.
        """
        while self.order:
            group = self.order[0]
            needed = group.state is State.AWAY and group.unused > 0
            if needed and (
                group.bring_at > position or group.nbytes > room or len(self.early) >= most or not self._fetch(group)
            ):
                break
            self.order.popleft()
            if needed:
                return group
        if self._backing.has_disk and self.order and not self._compute.capturing():
            for group in islice(self.order, min(READ_AHEAD, most)):
                stored = group.stored if group.state is State.AWAY else None
                if isinstance(stored, StoredGroup) and not self._backing.read_ahead(stored):
                    break
        return None

    def _fetch(self, group: Group) -> bool:
        """Fetch a group if nothing has to wait for that; return whether it comes."""
        if self._compute.capturing():
            return False
        if isinstance(group.stored, StoredGroup) and not group.stored.at_hand():
            return False
        try:
            self._transport.fetch(group)
        except torch.OutOfMemoryError:
            return False  # nobody needs it yet; by then there may be room
        self.early[group] = None
        return True
