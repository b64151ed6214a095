"""Memory that other processes hold is waited for."""

from __future__ import annotations

import threading
import time

import pytest

from tests.unit.migrator.offload.rig import dram_alone
from torch_tiers.allocator.errors import TierFull
from torch_tiers.allocator.host.room import Room
from torch_tiers.allocator.sizes import PAGE
from torch_tiers.migrator.offload import wait_for_others


def test_what_others_use_for_a_moment_is_waited_for() -> None:
    left = 0

    def others_are_done() -> None:
        nonlocal left
        left = 128 * PAGE

    done = threading.Timer(0.2, others_are_done)
    with dram_alone(4, room=lambda: Room(left, "")) as (backing, _):
        done.start()
        with pytest.raises(TierFull):
            backing.new(PAGE, 0)
        assert backing.new(PAGE, 0, insist=True).block is not None
        done.join()


def test_while_one_waits_for_others_the_other_threads_go_on() -> None:
    left = PAGE
    with dram_alone(2, room=lambda: Room(left, "")) as (backing, _):
        first = backing.new(PAGE, 0)
        left = 0
        dropping = threading.Timer(0.2, lambda: backing.drop(first))
        dropping.start()
        assert backing.new(PAGE, 1, insist=True).block is not None
        dropping.join()


def test_nobody_waits_for_others_for_ever_nor_again_for_what_was_waited_for_in_vain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each group of a step would have taken ten seconds."""
    monkeypatch.setattr(wait_for_others, "LONGEST_WAIT", 0.2)
    with dram_alone(4, room=lambda: Room(0, "")) as (backing, _):
        began = time.monotonic()
        for _ in range(20):
            with pytest.raises(TierFull):
                backing.new(PAGE, 0, insist=True)
        assert time.monotonic() - began < 2
