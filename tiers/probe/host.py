"""Host memory per NUMA node, and the path within it: memcpy."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

from torch_tiers.allocator.errors import TierFull
from torch_tiers.allocator.host.dram import DramArena, DramBlock
from torch_tiers.allocator.nvme.backend import BLOCK
from torch_tiers.allocator.sizes import PAGE, round_up
from torch_tiers.migrator.streams.host import HostLane
from torch_tiers.migrator.streams.pieces import whole
from torch_tiers.migrator.telemetry.counters import Counters
from torch_tiers.probe.affinity import Node, on_cores
from torch_tiers.probe.measure import Run, Waived, copies, window
from torch_tiers.probe.pattern import fill, matches
from torch_tiers.probe.results import Path


class HostMemory:
    """An arena on each NUMA node, made when it is first asked for, as `tiers` itself makes them.

    Parameters
    ----------
    capacity
        Bytes per node, taken from the system in one step.
    pinned
        Pin it, for GPUs.
    """

    def __init__(self, capacity: int, *, pinned: bool) -> None:
        self._capacity = capacity
        self._pinned = pinned
        self._arenas: dict[int, DramArena] = {}

    def take(self, node: Node, nbytes: int) -> DramBlock:
        """Take a block on `node`.

        Raises
        ------
        TierFull
            If the node has no room for it.
        Waived
            If no core of the node may be used, or the driver refuses to pin.
        """
        if not node.cores:
            raise Waived(f"this process may not run on the cores of NUMA node {node.number}")
        # The kernel puts a page on the node of the core that touches it first, and the arena touches here.
        with on_cores(node.cores):
            arena = self._arenas.get(node.number)
            if arena is None:
                step = max(self._capacity, PAGE)
                arena = self._arenas[node.number] = DramArena(self._capacity, pinned=self._pinned, step=step)
            block = arena.allocate(nbytes)
        if block is None:
            raise TierFull("dram", None, nbytes, arena.used, arena.capacity)
        if self._pinned and not arena.pinned:
            arena.free(block)
            raise Waived("the driver refuses to pin host memory")
        return block

    def grow(self, nodes: Iterable[Node]) -> None:
        """Take all memory from the system now: that takes seconds, which no path should have to spend."""
        for node in nodes:
            with suppress(Waived, TierFull):  # told to the paths, when they ask
                self.give(node, self.take(node, self._capacity))

    def give(self, node: Node, block: DramBlock) -> None:
        """Give a block back."""
        self._arenas[node.number].free(block)

    def close(self) -> None:
        """Give everything back to the system."""
        for arena in self._arenas.values():
            arena.close()


class MemcpyPath:
    """From one NUMA node to another or the same, by threads as those that play lanes without a GPU.

    Parameters
    ----------
    threads
        How many share each copy; they run on the cores of `source`.
    """

    def __init__(self, kind: str, memory: HostMemory, source: Node, destination: Node, threads: int) -> None:
        self.path = Path(kind, f"dram{source.number}", f"dram{destination.number}")
        self.cores = source.cores
        self._memory = memory
        self._nodes = (source, destination)
        self._threads = threads
        self._blocks: list[DramBlock] = []
        self._lanes: Sequence[HostLane] = ()
        self._salt = 0

    def why_not(self) -> str | None:  # noqa: D102
        barred = [node.number for node in self._nodes if not node.cores]
        return f"this process may not run on the cores of NUMA node {barred[0]}" if barred else None

    def prepare(self, size: int) -> None:  # noqa: D102
        for node in self._nodes:
            self._blocks.append(self._memory.take(node, window(size)))
        source, destination = self._blocks
        self._salt = secrets.randbits(32)
        fill(source.tensor, self._salt)
        destination.tensor.zero_()
        self._lanes = [HostLane("d2h", Counters()) for _ in range(self._threads)]

    def run(self, size: int) -> Run:  # noqa: D102
        source, destination = (block.tensor for block in self._blocks)
        part = round_up(-(-size // self._threads), BLOCK)
        start = time.perf_counter()
        done = []
        for index in range(copies(size)):
            at = slice(index * size, (index + 1) * size)
            pairs = zip(destination[at].split(part), source[at].split(part), strict=True)
            # The lanes take turns, or all small copies, which are one part each, would be for the first.
            done += [
                self._lanes[(index + turn) % self._threads].copy([whole(*pair)], []) for turn, pair in enumerate(pairs)
            ]
        for event in done:
            event.synchronize()
        return Run(window(size), time.perf_counter() - start)

    def intact(self) -> bool:  # noqa: D102
        return matches(self._blocks[1].tensor, self._salt)

    def release(self) -> None:  # noqa: D102
        for lane in self._lanes:
            lane.close()
        self._lanes = ()
        for node, block in zip(self._nodes, self._blocks, strict=False):
            self._memory.give(node, block)
        self._blocks = []
