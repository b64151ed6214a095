"""The arena's background work on memory that a GPU has mapped."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from torch_tiers.allocator.host.dram import DramArena
from torch_tiers.allocator.sizes import PAGE, MiB


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.mark.gpu
def test_memory_is_pinned_ahead_given_back_and_pinned_again() -> None:
    torch.cuda.init()
    arena = DramArena(256 * MiB, pinned=True, step=64 * MiB, idle_after=0.3)
    arena.reserve(128 * MiB)
    assert eventually(lambda: arena.grown == 128 * MiB)
    assert eventually(lambda: arena.grown == 0)
    block = arena.allocate(PAGE)
    assert block is not None and block.tensor.is_pinned()
    source = torch.randint(256, (PAGE,), dtype=torch.uint8, device="cuda")
    block.tensor.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(block.tensor, source.cpu())
    assert eventually(lambda: arena.grown == 64 * MiB)  # the goal came back with the demand, and idles again
    arena.close()


@pytest.mark.gpu
def test_the_keeper_makes_no_context_on_another_gpu() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    torch.cuda.set_device(1)
    free, _ = torch.cuda.mem_get_info(0)
    arena = DramArena(64 * MiB, pinned=True, step=64 * MiB, idle_after=0.1)
    arena.reserve(64 * MiB)
    assert eventually(lambda: arena.grown == 64 * MiB)
    assert eventually(lambda: arena.grown == 0)
    assert free - torch.cuda.mem_get_info(0)[0] < 32 * MiB
    arena.close()
