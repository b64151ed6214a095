"""A mover and its engine, over lanes that copy when a test tells them to; and a program that it is driven by."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from tests.unit.by_hand import HandLane, StreamCompute
from tests.unit.natively import built
from torch_tiers.allocator.host.dram import DramArena
from torch_tiers.allocator.overflow import Overflow
from torch_tiers.allocator.sizes import GiB, KiB, MiB
from torch_tiers.migrator.controller.learner import Learner
from torch_tiers.migrator.model.plan import PageGroup
from torch_tiers.migrator.offload.backing import Backing
from torch_tiers.migrator.offload.engine import Engine
from torch_tiers.migrator.policies import POLICIES
from torch_tiers.migrator.saved.actions import Go, Moved, Stay
from torch_tiers.migrator.saved.mover import Mover
from torch_tiers.migrator.telemetry.counters import Counters

NBYTES = 64 * KiB


class Rig:
    """A mover whose lanes move when told to; it learns for as long as a test does not switch to `planned`."""

    def __init__(
        self,
        dram: int = 64 * MiB,
        budget: int = 64 * MiB,
        policy: str = "move",
        recordings: int = 1,
        *,
        spills: bool = False,
        lent: int = 0,
    ) -> None:
        self.arena = DramArena(dram, pinned=False, step=dram)
        self.backing = Backing(self.arena, None, Counters())
        self.compute = StreamCompute()
        self.out, self.back = HandLane(), HandLane()
        self.engine = Engine(self.compute, self.out, self.back, self.backing, built())
        learner = Learner(POLICIES[policy], budget, recordings=recordings)
        self.mover = Mover(self.engine, learner, budget, built(), spills=spills, lent=lent)

    def planned(self, *groups: PageGroup, limit: int = GiB) -> list[list[Go]]:
        """As if a plan had these groups: per group what it says of each site."""
        self.mover.recorder = None
        self.engine.hbm.limit = limit
        return [[Go(self.mover, group) for _ in group.sites] for group in groups]

    def save(self, key: str, go: Go | None = None, tensor: torch.Tensor | None = None) -> Moved:
        tensor = torch.zeros(NBYTES, dtype=torch.uint8) if tensor is None else tensor
        return self.mover.take(tensor, key, go)

    def settle(self) -> None:
        """What was released is out of HBM."""
        self.out.run()

    def release(self) -> None:
        """Nothing that leaves may stay in HBM any longer."""
        self.engine.hbm.limit = 0
        self.engine.relieve()

    def restore(self, moved: Moved) -> torch.Tensor:
        self.out.run()
        tensor = self.mover.restore(moved)
        self.back.run()
        return tensor

    def close(self) -> None:
        self.out.run()
        self.back.run()
        self.backing.close()
        self.arena.close()


Program = Mapping[str, int]  # sites in the order in which they are saved, with the bytes of each


def run(rig: Rig, program: Program, *, check: Callable[[], None] = lambda: None, overflow: int = 0) -> bool:
    """One iteration as the hooks make it, with backward in reverse; whether there are new plans."""
    mover, actions = rig.mover, dict(rig.mover.actions())
    graph: list[tuple[Moved | Stay, torch.Tensor]] = []
    for number, (key, nbytes) in enumerate(program.items()):
        tensor = torch.full((nbytes,), number % 251, dtype=torch.uint8)
        action = actions.get(key)
        if isinstance(action, Stay):
            if action.enter:
                mover.engine.enter(action.enter)
            if mover.recorder is not None:
                mover.recorder.save(key, mover.storages.find(tensor), stays=True)
            graph.append((action, tensor))
        else:
            graph.append((rig.save(key, action, tensor), tensor.clone()))
        check()
        del tensor  # else the last one is the program's own
    rig.settle()
    mover.begin_backward()
    while graph:
        packed, tensor = graph.pop()
        if isinstance(packed, Stay):
            if packed.leave:
                mover.engine.leave(packed.leave)
        else:
            if packed.record is not None:
                packed.record.used()
            assert torch.equal(rig.restore(packed), tensor)
        del packed, tensor
        check()
    return mover.end_iteration(whole=True, overflow=Overflow(overflow))


def layers(count: int, nbytes: int = MiB, name: str = "layer") -> Program:
    return {f"{name}{k}:0": nbytes for k in range(count)}
