"""The groups of a simulated step: which way they go, and when they are where."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch_tiers.allocator.sizes import PAGE, round_up
from torch_tiers.migrator.model.plan import PageGroup
from torch_tiers.migrator.planner.schedule import Span
from torch_tiers.migrator.simulator.machine import Machine


@dataclass(slots=True, eq=False)
class Group:
    """A group of the plan in this step, and when each of its copies ends."""

    planned: PageGroup
    span: Span
    way_out: tuple[str, ...]  # lanes, in the order in which they are travelled
    way_back: tuple[str, ...]
    lasting: Sequence[tuple[int, int]]  # what the program holds of it: until which stretch, and how many bytes
    offload_begins: float = 0.0
    out: float = -1.0  # when the copy out ends; negative before it began
    written: float = 0.0  # when it is on disk
    read: float = -1.0  # when it is in DRAM again, should it come back through it; negative before it was asked for
    begins: float = 0.0
    home: float = -1.0  # when the copy back ends; negative before it began
    away: bool = False  # HBM was released

    @property
    def is_staged(self) -> bool:
        """Whether it goes on to NVMe from DRAM, and comes back through it."""
        return len(self.way_back) > 1

    @property
    def is_in_dram(self) -> bool:
        """Whether it stays in DRAM while it is away."""
        return self.way_out == ("d2h",)

    def leave(self, machine: Machine) -> None:
        """Queue its copies out."""
        first, *onward = self.way_out
        self.offload_begins, self.out = machine.copy(first, self.planned.nbytes, machine.now)
        self.written = self.out
        for lane in onward:
            _, self.written = machine.copy(lane, self.planned.nbytes, self.written)

    def read_ahead(self, machine: Machine) -> None:
        """Queue its copy from NVMe to DRAM, if there is to be one and it has not begun."""
        if self.is_staged and self.away and self.read < 0:
            _, self.read = machine.copy(self.way_back[0], self.planned.nbytes, max(machine.now, self.written))

    def unpause_after_interrupt(self, machine: Machine) -> None:
        """Queue its copy to HBM."""
        self.begins, self.home = machine.copy(self.way_back[-1], self.planned.nbytes, max(machine.now, self.out))


def past_dram(groups: Sequence[PageGroup], holds: int) -> frozenset[int]:
    """Numbers of the groups that go on to NVMe, as DRAM holds only so many bytes: those needed never, or last."""
    nbytes = {n: round_up(group.nbytes, PAGE) for n, group in enumerate(groups) if group.tier != "nvme"}
    excess = sum(nbytes.values()) - holds
    past = []
    needed = {n: math.inf if (use := groups[n].first_use) is None else use for n in nbytes}
    for number in sorted(nbytes, key=lambda n: -needed[n]):
        if excess <= 0:
            break
        past.append(number)
        excess -= nbytes[number]
    return frozenset(past)
