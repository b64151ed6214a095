"""An engine over lanes that move when told to, and a graph that holds what was saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.unit.by_hand import HandLane, HandStore, StreamCompute
from tests.unit.natively import built
from torch_tiers.allocator.host.dram import DramArena
from torch_tiers.allocator.host.room import Room
from torch_tiers.allocator.sizes import PAGE, KiB, MiB
from torch_tiers.migrator.offload.backing import Backing
from torch_tiers.migrator.offload.engine import Engine
from torch_tiers.migrator.offload.group import Group, Saved
from torch_tiers.migrator.telemetry.counters import Counters

NBYTES = 64 * KiB


graph: list[Held] = []
"""All that the graph holds: a test need not."""


class Held:
    """A saved tensor, as the graph holds it."""

    def __init__(self, engine: Engine, group: Group, tensor: torch.Tensor, saved: Saved | None = None) -> None:
        self.engine = engine
        self.group = group
        self.expected = tensor.clone()
        self.memory = StorageWeakRef(tensor.untyped_storage())
        self.saved = saved or engine.add(group, tensor, 0, tensor.numel())
        self.was_used = False
        self.claim = engine.hold(self.saved)
        graph.append(self)

    def use(self) -> torch.Tensor:
        """Backward asks for it."""
        engine = self.engine
        with engine.lock:
            engine.collect()
            buffer = engine.source(self.saved)
            if not self.was_used:
                self.was_used = True
                engine.used(self.group)
            if engine.unsettled:
                engine.prefetch()
        if buffer is None:
            return self.saved.alias.detach()
        return buffer[self.saved.offset : self.saved.offset + self.saved.nbytes]

    def die(self) -> None:
        """The graph releases it; the engine learns of it when it looks."""
        graph.remove(self)
        del self.claim, self.saved


class Rig:
    """An engine whose lanes move when told to."""

    def __init__(self, dram: int = 16 * MiB, store: HandStore | None = None) -> None:
        self.arena = DramArena(dram, pinned=False, step=dram)
        self.backing = Backing(self.arena, store, Counters())  # type: ignore[arg-type]
        self.compute = StreamCompute()
        self.out, self.back = HandLane(), HandLane()
        self.engine = Engine(self.compute, self.out, self.back, self.backing, built())
        self.engine.hbm.limit = 0

    def group(self, next_use: int = 0) -> Group:
        return Group(next_use, self.compute.stream())

    def held(self, group: Group, nbytes: int = NBYTES, value: int | None = None) -> Held:
        tensor = (
            torch.randint(256, (nbytes,), dtype=torch.uint8)
            if value is None
            else torch.full((nbytes,), value, dtype=torch.uint8)
        )
        return Held(self.engine, group, tensor)

    def offloaded(self, next_use: int = 0, count: int = 1) -> list[Held]:
        """A group on its way; it is released at once if the limit says so."""
        group = self.group(next_use)
        held = [self.held(group) for _ in range(count)]
        self.engine.offload(group)
        return held

    def run(self) -> None:
        self.out.run()
        self.back.run()

    def close(self) -> None:
        self.run()
        self.backing.close()
        self.arena.close()


def assert_nothing_left(rig: Rig) -> None:
    rig.run()
    rig.engine.collect()
    assert (rig.engine.hbm.resident, rig.engine.alive, rig.arena.used) == (0, 0, 0)


def assert_comes_back(rig: Rig, held: Held) -> None:
    """Backward asks for it, and gets what was saved."""
    view = held.use()
    rig.back.run()
    assert torch.equal(view, held.expected)


@contextmanager
def dram_alone(
    pages: int, *, step: int = PAGE, room: Callable[[], Room] | None = None
) -> Iterator[tuple[Backing, DramArena]]:
    """A backing without a disk; whatever a test leaves in it must close without help."""
    arena = DramArena(pages * PAGE, pinned=False, step=step, room=room)
    backing = Backing(arena, None, Counters())
    yield backing, arena
    backing.close()
    arena.close()
