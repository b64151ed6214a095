"""Blocks that move to another tier under the same address."""

from __future__ import annotations

import ctypes
import threading

from torch_tiers.allocator.native import DRAM, HBM, Core
from torch_tiers.allocator.sizes import MiB


def test_a_thread_that_reads_what_moves_finds_it_mapped(core: Core) -> None:
    """Such as one that writes a checkpoint: what moves is mapped nowhere for a while, and to read that is fatal."""
    core.limit(DRAM, 64 * MiB)
    nbytes = 16 * MiB
    block = core.allocate(nbytes)
    memory = (ctypes.c_ubyte * nbytes).from_address(block)
    memory[0] = memory[nbytes - 1] = 7
    reads, over = [0], threading.Event()

    def read() -> None:
        while not over.is_set():
            assert memory[0] == memory[nbytes - 1] == 7
            reads[0] += 1

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for _ in range(50):
            core.move(block, DRAM)
            core.move(block, HBM)
    finally:
        over.set()
        thread.join()
    assert reads[0] > 0
    core.free(block)
