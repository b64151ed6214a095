"""An engine with a direct way to NVMe: what tests of that way stand on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import torch

from tests.unit.natively import built
from torch_tiers.allocator.errors import StoreError
from torch_tiers.allocator.host.dram import DramArena
from torch_tiers.allocator.nvme.cufile import deregister, register
from torch_tiers.allocator.nvme.extent import NvmeExtent
from torch_tiers.allocator.nvme.kvikio import KvikioFile, Mode
from torch_tiers.allocator.nvme.posix import PosixFile
from torch_tiers.allocator.nvme.ring import Ring
from torch_tiers.allocator.nvme.store import NvmeStore
from torch_tiers.allocator.sizes import GiB, KiB, MiB
from torch_tiers.migrator.offload.backing import Backing
from torch_tiers.migrator.offload.direct import Direct, DirectWay
from torch_tiers.migrator.offload.engine import Engine
from torch_tiers.migrator.offload.group import Group, Saved
from torch_tiers.migrator.streams.host import HostCompute, HostLane
from torch_tiers.migrator.telemetry.counters import Counters

SLOT, SLOTS = 64 * KiB, 3
CPU = torch.device("cpu")


class Drives(NvmeStore):
    """A store whose requests fail, or wait, as a test says."""

    fails: Callable[[str], bool] = staticmethod(lambda action: False)
    go_on: threading.Event | None = None

    def write(self, extent: NvmeExtent, block: torch.Tensor) -> Future[None]:
        return self._failed("write") or super().write(extent, block)

    def read(self, extent: NvmeExtent, block: torch.Tensor, arrived: object = None) -> Future[None]:
        return self._failed("read") or super().read(extent, block)

    def _failed(self, action: str) -> Future[None] | None:
        if self.go_on is not None:
            self.go_on.wait()
        if not self.fails(action):
            return None
        future: Future[None] = Future()
        future.set_exception(StoreError(self.where, 0, 1, action, "as the test says"))
        return future


class Rig:
    """An engine of the host, whose memory plays HBM, with a direct way.

    Its file is a plain one, or, with the `mode` of a `KvikioFile`, one that slots go to through cuFile.
    """

    def __init__(self, directory: Path, capacity: int = 64 * MiB, mode: Mode | None = None) -> None:
        self.counters = Counters()
        registrars = (None, None) if mode is None else (register, deregister)
        self.rings = Ring(CPU, SLOTS, SLOT, *registrars), Ring(CPU, SLOTS, SLOT, *registrars)
        backend = PosixFile if mode is None else partial(KvikioFile, mode=mode, direct=self._in_a_slot)
        self.store = Drives([directory], capacity, gds="off", step=MiB, backend=backend)
        self.arena = DramArena(64 * MiB, pinned=False, step=MiB)
        self.backing = Backing(self.arena, self.store, self.counters)
        out, back = HostLane("gds_write", Counters()), HostLane("gds_read", Counters())
        self.direct = Direct(DirectWay(self.store, *self.rings), out, back, self.counters)
        self.out = out
        lanes = HostLane("d2h", self.counters), HostLane("h2d", self.counters)
        self.engine = Engine(HostCompute(self.counters), *lanes, self.backing, built(), self.direct)
        self.engine.hbm.limit = GiB
        self._lanes = lanes
        self.held: list[object] = []

    def offload(self, *sizes: int, tier: str | None = "nvme") -> tuple[Group, list[Saved], list[torch.Tensor]]:
        """A group of storages of `sizes` bytes with random contents, which is on its way."""
        group = Group(0, None, tier=tier)
        tensors = [torch.randint(256, (size,), dtype=torch.uint8) for size in sizes]
        saved = [self.engine.add(group, tensor, 0, tensor.numel()) for tensor in tensors]
        self.held += [self.engine.hold(each) for each in saved]
        with self.engine.lock:
            self.engine.offload(group)
        return group, saved, [tensor.clone() for tensor in tensors]

    def release(self) -> None:
        with self.engine.lock:
            self.engine.hbm.limit = 0
            self.engine.relieve()
            self.engine.hbm.limit = GiB

    def back(self, saved: Saved) -> torch.Tensor:
        with self.engine.lock:
            buffer = self.engine.source(saved)
        assert buffer is not None
        return buffer[saved.offset : saved.offset + saved.nbytes]

    def forget(self) -> None:
        """The graph dies."""
        self.held = []
        with self.engine.lock:
            self.engine.collect()

    def _in_a_slot(self, block: torch.Tensor) -> bool:
        return any(ring.holds(block) for ring in self.rings)

    def close(self) -> None:
        if self.store.go_on is not None:  # of a test that failed before it said so
            self.store.go_on.set()
        for lane in self._lanes:
            lane.close()
        self.direct.close()
        self.backing.close()
        self.store.close()
        self.arena.close()
