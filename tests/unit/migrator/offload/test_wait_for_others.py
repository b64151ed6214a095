"""Memory that other processes hold is waited for."""

from __future__ import annotations

import threading
import time

import pytest

from torch_tiers.allocator.errors import TierFull
from torch_tiers.allocator.host.dram import DramArena
from torch_tiers.allocator.host.room import Room
from torch_tiers.allocator.sizes import PAGE
from torch_tiers.migrator.offload import wait_for_others
from torch_tiers.migrator.offload.backing import Backing
from torch_tiers.migrator.telemetry.counters import Counters


def test_what_others_use_for_a_moment_is_waited_for() -> None:
    left = 0
    arena = DramArena(4 * PAGE, pinned=False, step=PAGE, room=lambda: Room(left, ""))
    backing = Backing(arena, None, Counters())

    def others_are_done() -> None:
        nonlocal left
        left = 128 * PAGE

    done = threading.Timer(0.2, others_are_done)
    done.start()
    with pytest.raises(TierFull):
        backing.new(PAGE, 0)
    assert backing.new(PAGE, 0, insist=True).block is not None
    done.join()
    backing.close()
    arena.close()


def test_while_one_waits_for_others_the_other_threads_go_on() -> None:
    left = PAGE
    arena = DramArena(2 * PAGE, pinned=False, step=PAGE, room=lambda: Room(left, ""))
    backing = Backing(arena, None, Counters())
    first = backing.new(PAGE, 0)
    left = 0
    dropping = threading.Timer(0.2, lambda: backing.drop(first))
    dropping.start()
    assert backing.new(PAGE, 1, insist=True).block is not None
    dropping.join()
    backing.close()
    arena.close()


def test_nobody_waits_for_others_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_for_others, "LONGEST_WAIT", 0.1)
    arena = DramArena(4 * PAGE, pinned=False, step=PAGE, room=lambda: Room(0, ""))
    backing = Backing(arena, None, Counters())
    with pytest.raises(TierFull):
        backing.new(PAGE, 0, insist=True)
    backing.close()
    arena.close()


def test_what_was_waited_for_in_vain_is_not_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group of a step would have taken ten seconds."""
    monkeypatch.setattr(wait_for_others, "LONGEST_WAIT", 0.2)
    arena = DramArena(4 * PAGE, pinned=False, step=PAGE, room=lambda: Room(0, ""))
    backing = Backing(arena, None, Counters())
    began = time.monotonic()
    for _ in range(20):
        with pytest.raises(TierFull):
            backing.new(PAGE, 0, insist=True)
    assert time.monotonic() - began < 2
    backing.close()
    arena.close()
