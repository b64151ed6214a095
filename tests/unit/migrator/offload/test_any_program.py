"""Random programs over slow lanes and disks, in threads: each gets back what it saved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import torch

from tests.unit.migrator.offload.rig import Held
from tests.unit.natively import built
from torch_tiers.allocator.host.dram import DramArena
from torch_tiers.allocator.nvme.store import NvmeStore
from torch_tiers.allocator.sizes import PAGE, KiB, MiB
from torch_tiers.migrator.offload.backing import Backing
from torch_tiers.migrator.offload.engine import Engine
from torch_tiers.migrator.offload.group import Group
from torch_tiers.migrator.streams.host import HostCompute, HostLane
from torch_tiers.migrator.telemetry.counters import Counters


@dataclass
class Real:
    """Threads for lanes, slow ones, and perhaps a disk."""

    engine: Engine
    backing: Backing
    arena: DramArena
    store: NvmeStore | None
    lanes: list[HostLane]

    def close(self) -> None:
        for lane in self.lanes:
            lane.close()
        self.backing.close()
        self.engine.collect()
        assert (self.engine.hbm.resident, self.engine.alive, self.arena.used) == (0, 0, 0)
        if self.store is not None:
            assert self.store.used == 0
            self.store.close()
        self.arena.close()


def real(dram: int, path: Path | None) -> Real:
    counters = Counters()
    arena = DramArena(dram, pinned=False, step=dram)
    store = None if path is None else NvmeStore([path], 256 * MiB, gds="off", stripe=MiB, step=32 * MiB)
    backing = Backing(arena, store, counters)
    lanes = [HostLane(name, counters, bytes_per_second=400 * MiB) for name in ("d2h", "h2d")]
    return Real(Engine(HostCompute(counters), lanes[0], lanes[1], backing, built()), backing, arena, store, lanes)


def forward(engine: Engine, rng: Random, groups: int) -> list[Held]:
    """Saves tensors into groups of all sizes; some are saved twice, some groups stay incomplete."""
    held: list[Held] = []
    for number in range(groups):
        group = Group(-number, engine.compute.stream())
        for _ in range(rng.randrange(1, 5)):
            tensor = torch.randint(256, (rng.randrange(1, 300 * KiB),), dtype=torch.uint8)
            held.append(Held(engine, group, tensor))
            if rng.random() < 0.2:
                held.append(Held(engine, group, tensor, held[-1].saved))
        if rng.random() < 0.9:
            engine.offload(group)
            if rng.random() < 0.2:  # saved once more when its group is on its way, or gone
                held.append(Held(engine, group, tensor, held[-1].saved))
        if rng.random() < 0.2:
            engine.enter(rng.randrange(200 * KiB))
    return held


def backward(engine: Engine, rng: Random, held: list[Held]) -> None:
    """Asks for most of it in reverse, some of it out of order, some of it twice; then the graph dies."""
    engine.begin_backward()
    order = held[::-1]
    for _ in range(3):
        if rng.random() < 0.5:
            one, other = (rng.randrange(len(order)) for _ in range(2))
            order[one], order[other] = order[other], order[one]
    again = rng.random() < 0.3
    for step in range(1 + again):
        for tensor in order:
            if rng.random() < 0.9:
                assert torch.equal(tensor.use(), tensor.expected)
                if rng.random() < 0.1:
                    engine.leave(rng.randrange(200 * KiB))
            if step == again:
                tensor.die()


@pytest.mark.parametrize("on_disk", [False, True], ids=["dram", "nvme"])
def test_any_program_gets_back_what_it_saved(on_disk: bool, tmp_path: Path, seed: int) -> None:
    rng = Random(seed)
    torch.manual_seed(seed)
    rig = real(8 * PAGE if on_disk else 128 * MiB, tmp_path if on_disk else None)
    kept: list[Held] = []
    for _ in range(12):
        rig.engine.hbm.limit = rng.choice([0, 200 * KiB, MiB, 100 * MiB])
        held = forward(rig.engine, rng, rng.randrange(1, 20))
        if rng.random() < 0.2:  # an exception: this graph dies without a backward
            for tensor in held:
                tensor.die()
        elif rng.random() < 0.2:  # two losses: this graph waits for the next iteration
            kept.extend(held)
        else:
            backward(rig.engine, rng, kept + held)
            kept = []
        rig.engine.end_iteration()
        assert rig.engine.hbm.resident >= 0
    for tensor in kept:
        assert torch.equal(tensor.use(), tensor.expected)
        tensor.die()
    rig.close()
