"""How close to the speed of the drive alone do page groups go from HBM to a drive and back, way by way?

``python -m benchmarks.drive_ways --directory /mnt/nvme0 --size 4GiB --rounds 5``

``drive alone`` moves pinned memory by O_DIRECT, in as many requests as the store has in flight, and ``kvikio alone``
the GPU's by kvikio's calls, in as many as the staging slots are: what the ways below them can come close to. ``through
dram`` and ``directly`` are the engine with groups of ``--group`` and checksums; the direct way goes by cuFile, or by
kvikio's compatibility mode with ``--compat``. All use as many files. Each way of ours reads what it wrote, and what
comes back is compared. Prints GB/s, the median of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torch_tiers.allocator.host.dram import DramArena
from torch_tiers.allocator.nvme import cufile
from torch_tiers.allocator.nvme.backend import Backend
from torch_tiers.allocator.nvme.files import FILES, several
from torch_tiers.allocator.nvme.kvikio import KvikioFile
from torch_tiers.allocator.nvme.posix import PosixFile
from torch_tiers.allocator.nvme.ring import Ring
from torch_tiers.allocator.nvme.store import DEPTH, STRIPE, NvmeStore
from torch_tiers.allocator.nvme.ways import RING, SLOT_BYTES, SLOTS
from torch_tiers.allocator.sizes import GiB, format_size, parse_size
from torch_tiers.migrator.offload.backing import Backing
from torch_tiers.migrator.offload.direct import Direct, DirectWay
from torch_tiers.migrator.offload.direct.stored import DirectStoredGroup
from torch_tiers.migrator.offload.engine import Engine
from torch_tiers.migrator.offload.group import NEVER, Group, Saved
from torch_tiers.migrator.runtime.devices import lanes, open_device
from torch_tiers.migrator.saved import native
from torch_tiers.migrator.telemetry.counters import Counters
from torch_tiers.places import cache_directory

AHEAD = 6  # groups that may be in HBM again

Opener = Callable[[Path], Backend]


@dataclass(eq=False)
class Sent:
    group: Group
    saved: Saved
    held: object  # what the graph holds, until backward has used it


class Alone:
    """Files by themselves, with memory of the host or of the GPU; nothing is checked."""

    def __init__(self, file: Backend, size: int, in_flight: int, **memory: Any) -> None:
        self._file = file
        self._file.grow(2 * size)
        self._memory = [torch.ones(size, dtype=torch.uint8, **memory) for _ in range(2)]
        self._pool = ThreadPoolExecutor(in_flight)
        self._size = size

    def write(self) -> None:
        self._all(self._file.pwrite, self._memory[0], 0)

    def read(self) -> None:
        self._all(self._file.pread, self._memory[0], 0)

    def both(self) -> None:
        """Half of the bytes each way."""
        half = self._size // 2
        with ThreadPoolExecutor(2) as two:
            ends = [
                two.submit(self._all, self._file.pwrite, self._memory[0][:half], self._size),
                two.submit(self._all, self._file.pread, self._memory[1][:half], 0),
            ]
            for end in ends:
                end.result()

    def _all(self, move: Callable[[torch.Tensor, int], int], memory: torch.Tensor, first: int) -> None:
        list(self._pool.map(lambda at: move(memory[at : at + STRIPE], first + at), range(0, memory.numel(), STRIPE)))

    def close(self) -> None:
        self._pool.shutdown()
        self._file.close()


class ByEngine:
    """Groups as they go in training: out as they are saved, back in order and ahead of their use."""

    def __init__(
        self, directory: Path, backend: Opener, size: int, group: int, *, direct: bool, registers: bool = False
    ) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        counters = Counters()
        self._size, self._group = size, group
        self._store = NvmeStore([directory], 2 * size, gds="off", step=2 * size, backend=backend)
        self._arena = DramArena(GiB, pinned=True, step=GiB)
        self._backing = Backing(self._arena, self._store, counters)
        self._device = open_device(device, counters, 0)
        self._direct: Direct | None = None
        if direct:
            register = (cufile.register, cufile.deregister) if registers else (None, None)
            rings = [Ring(device, SLOTS, SLOT_BYTES, *register) for _ in range(2)]
            way = DirectWay(self._store, rings[0], rings[1])
            self._direct = Direct(way, *lanes(device, ("gds_write", "gds_read"), counters), counters)
        self._engine = Engine(
            self._device.compute,
            self._device.out,
            self._device.back,
            self._backing,
            native.load(native.MODULE.build(cache_directory())),
            self._direct,
        )
        self._data = torch.randint(256, (self._group,), dtype=torch.uint8, device=device)
        self._groups: list[Sent] = []

    def write(self) -> None:
        self._forget()
        self._groups = self._send(self._size // self._group)
        self._wait_until_stored(self._groups)

    def read(self) -> None:
        self._back(self._groups)

    def both(self) -> None:
        """Half of the bytes each way, the newer half going out while the older one comes back."""
        self._forget()
        self._groups = self._send(self._size // self._group // 2)
        self._wait_until_stored(self._groups)
        torch.cuda.synchronize()
        self.begin_both = time.perf_counter()
        new = self._send(self._size // self._group // 2, late=True)
        self._back(self._groups)
        self._wait_until_stored(new)
        self._groups += new

    def _send(self, count: int, *, late: bool = False) -> list[Sent]:
        engine = self._engine
        sent: list[Sent] = []
        for number in range(count):
            group = Group(NEVER if late else number, engine.compute.stream(), tier="nvme")
            saved = engine.add(group, self._data, 0, self._group)
            held = engine.hold(saved)
            with engine.lock:
                engine.hbm.limit = 1 << 60
                engine.offload(group)
                engine.hbm.limit = 0
                engine.relieve()
            sent.append(Sent(group, saved, held))
        return sent

    def _wait_until_stored(self, groups: list[Sent]) -> None:
        for each in groups:
            stored = each.group.stored
            if isinstance(stored, DirectStoredGroup):
                for chunk in stored.chunks:
                    chunk.written.result()
            elif stored is not None and stored.writing is not None:
                stored.writing.result()

    def _back(self, groups: list[Sent]) -> None:
        engine = self._engine
        engine.hbm.limit = AHEAD * self._group
        engine.begin_backward()
        for each in groups:
            with engine.lock:
                buffer = engine.source(each.saved)
                assert buffer is not None
                self._last = buffer
                engine.used(each.group)
                each.held = None
                engine.collect()
                engine.prefetch()
        torch.cuda.synchronize()
        assert torch.equal(self._last, self._data), "other bytes came back"

    def _forget(self) -> None:
        self._groups = []
        with self._engine.lock:
            self._engine.collect()

    def close(self) -> None:
        self._forget()
        if self._direct is not None:
            self._direct.close()
        self._device.out.close()
        self._device.back.close()
        self._backing.close()
        self._store.close()
        self._arena.close()


def measure(directory: Path, size: int, group: int, rounds: int, *, files: int, compat: bool) -> None:
    posix: Opener = several(PosixFile, files)
    kvikio: Opener = several(partial(KvikioFile, mode="compat" if compat else "gds"), files)
    makers: dict[str, Callable[[], Alone | ByEngine]] = {
        "drive alone": lambda: Alone(posix(directory), size, DEPTH, pin_memory=True),
        "through dram": lambda: ByEngine(directory, posix, size, group, direct=False),
        "kvikio alone": lambda: Alone(kvikio(directory), size, RING // STRIPE, device="cuda"),
        "directly": lambda: ByEngine(directory, kvikio, size, group, direct=True, registers=not compat),
    }
    took: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for name, make in makers.items():  # one at a time: files of all of them may not fit
            way = make()
            for _ in range(2):  # the first time memory and disk are taken
                for action in ("write", "read", "both"):
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                    getattr(way, action)()
                    start = getattr(way, "begin_both", start) if action == "both" else start
                    took.setdefault((name, action), []).append(time.perf_counter() - start)
            way.close()
            for action in ("write", "read", "both"):
                del took[name, action][-2]
    what = f"{format_size(size)} in groups of {format_size(group)}, {files} files in {directory.resolve()}"
    print(f"{what}, {torch.cuda.get_device_name()}")
    print(f"{'GB/s':14}{'write':>8}{'read':>8}{'both':>8}")
    for name in makers:
        rates = [size / statistics.median(took[name, action]) / 1e9 for action in ("write", "read", "both")]
        print(f"{name:14}" + "".join(f"{rate:8.2f}" for rate in rates))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, action="append", help="may be repeated")
    parser.add_argument("--size", type=parse_size, default=parse_size("4GiB"))
    parser.add_argument("--group", type=parse_size, default=parse_size("64MiB"), help="bytes that move at once")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--files", type=int, default=FILES, help="in each directory")
    parser.add_argument("--compat", action="store_true", help="by kvikio's compatibility mode instead of cuFile")
    options = parser.parse_args()
    for directory in options.directory or [Path()]:
        measure(directory, options.size, options.group, options.rounds, files=options.files, compat=options.compat)


if __name__ == "__main__":
    main()
