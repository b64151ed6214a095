"""Groups that go to NVMe past the host's memory: what comes back is what left, whatever the drives do."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.unit.by_hand import eventually, raising
from tests.unit.migrator.offload.direct_rig import SLOT, Rig
from torch_tiers.allocator.errors import StoreError, TierFull
from torch_tiers.allocator.nvme.kvikio import Mode
from torch_tiers.migrator.offload.group import State
from torch_tiers.migrator.streams.host import HostEvent


@pytest.fixture(params=[None, "gds"], ids=["plain", "cufile"])
def mode(request: pytest.FixtureRequest) -> Mode | None:
    """How slots go to the file. Through cuFile a double looks at each call."""
    if request.param == "gds":
        request.getfixturevalue("fake")
    mode: Mode | None = request.param
    return mode


@pytest.fixture
def rig(mode: Mode | None, tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path, mode=mode)
    yield rig
    rig.close()


def test_a_group_comes_back_bit_for_bit_and_never_lies_in_dram(rig: Rig) -> None:
    group, saved, contents = rig.offload(5000, 3 * SLOT, 1, 512, 2 * SLOT + 700)  # across slots, and past the ring
    rig.release()
    assert group.state is State.AWAY
    assert all(torch.equal(rig.back(each), content) for each, content in zip(saved, contents, strict=True))
    assert rig.arena.peak == 0
    assert group.stored is not None
    moved = rig.counters.moved
    assert moved["gds_read"] >= moved["gds_write"] == group.stored.nbytes and moved["d2h"] == moved["h2d"] == 0
    assert rig.store.used >= group.nbytes


def test_many_groups_are_under_way_at_once(rig: Rig, seed: int) -> None:
    random.seed(seed)
    offloaded = [
        rig.offload(*(random.randrange(1, 2 * SLOT) for _ in range(random.randrange(1, 5)))) for _ in range(40)
    ]
    rig.release()
    random.shuffle(offloaded)
    for _, saved, contents in offloaded:
        assert all(torch.equal(rig.back(each), content) for each, content in zip(saved, contents, strict=True))


def test_what_the_drives_do_not_take_stays_in_the_hosts_memory_which_is_said_once(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    turns = iter(range(10**6))
    rig.store.fails = lambda action: action == "write" and next(turns) % 3 == 0
    with caplog.at_level(logging.WARNING):
        _, saved, contents = rig.offload(7 * SLOT)
        _, more, others = rig.offload(4 * SLOT)
        rig.release()
        assert torch.equal(rig.back(saved[0]), contents[0])
        assert torch.equal(rig.back(more[0]), others[0])
    moved, kept = rig.counters.moved, 4 * SLOT
    assert moved["d2h"] == moved["h2d"] == kept and moved["gds_write"] == moved["gds_read"] == 11 * SLOT - kept
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "nvme refused a write; refused bytes stay in host memory, beyond its budget"
    ]


@pytest.mark.parametrize("failing", range(4))
def test_a_read_that_fails_raises_and_leaves_nothing_behind(rig: Rig, failing: int) -> None:
    _, saved, _ = rig.offload(4 * SLOT)
    rig.release()
    turns = iter(range(10**6))
    rig.store.fails = lambda action: action == "read" and next(turns) == failing
    with pytest.raises(StoreError, match="as the test says"):
        rig.back(saved[0])
    rig.forget()
    assert eventually(lambda: rig.store.used == 0)


def test_a_drive_without_room_offloads_groups_through_dram(mode: Mode | None, tmp_path: Path) -> None:
    rig = Rig(tmp_path, capacity=2 * SLOT, mode=mode)
    _, saved, contents = rig.offload(3 * SLOT)
    rig.release()
    assert rig.arena.peak > 0 and rig.counters.moved["gds_write"] == 0
    assert torch.equal(rig.back(saved[0]), contents[0])
    rig.close()


def test_a_group_that_the_direct_way_fails_on_goes_by_dram_which_is_said_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended training, and the bytes were still in HBM."""
    monkeypatch.setattr(rig.out, "copy", raising(torch.OutOfMemoryError, "no room to gather in"))
    with caplog.at_level(logging.WARNING):
        offloaded = [rig.offload(2 * SLOT, 100) for _ in range(2)]
        rig.release()
    assert [group.state for group, *_ in offloaded] == 2 * [State.AWAY]
    for _, saved, contents in offloaded:
        assert all(torch.equal(rig.back(each), content) for each, content in zip(saved, contents, strict=True))
    told = [record.getMessage() for record in caplog.records]
    assert sum("a direct transfer to nvme failed" in text and "no room to gather in" in text for text in told) == 1
    rig.forget()

    def given_back() -> bool:
        """Going by DRAM they were on their way to a drive: such extents are given back when another group is."""
        rig.offload(100, tier="dram")
        rig.release()
        rig.forget()
        return rig.store.used == 0

    assert eventually(given_back)


def test_a_group_that_finds_no_way_out_stays(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    for way, name in ((rig.out, "copy"), (rig.backing, "new")):
        monkeypatch.setattr(way, name, raising(TierFull, "dram", None, 1, 0, 0))
    group, saved, contents = rig.offload(2 * SLOT)
    rig.release()
    assert group.members and rig.engine.hbm.resident == group.nbytes and rig.engine.source(saved[0]) is None
    assert torch.equal(saved[0].alias, contents[0])
    rig.forget()
    assert not group.members and rig.engine.hbm.resident == 0


def test_a_write_that_cannot_be_asked_for_is_kept_in_the_hosts_memory(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig.store, "write", raising(RuntimeError, "can't start new thread"))
    _, saved, contents = rig.offload(2 * SLOT)
    rig.release()
    assert torch.equal(rig.back(saved[0]), contents[0])


def test_room_on_the_drives_is_there_again_once_a_dropped_group_is_written(rig: Rig) -> None:
    """Nobody looked before the next group was offloaded or dropped: a tier looked full that was not."""
    rig.store.go_on = threading.Event()
    rig.offload(SLOT)
    rig.release()  # a slot was free
    rig.forget()
    assert rig.store.used > 0
    rig.store.go_on.set()
    assert eventually(lambda: rig.store.used == 0)


@contextmanager
def interrupted() -> Iterator[None]:
    """Ctrl-C once what is done inside waits for another thread."""
    main, inside, waits = threading.main_thread().ident, threading.Event(), 0

    def interrupt() -> None:
        nonlocal waits
        inside.wait()
        while waits < 3:  # looks, one after the other
            time.sleep(0.02)
            frame = sys._current_frames()[main]
            waits = waits + 1 if frame.f_code.co_filename == threading.__file__ else 0
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        inside.set()
        yield
    thread.join()


def test_a_buffer_that_is_read_into_outlives_an_interrupted_glimpse(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory was the next tensor's, and the lane wrote there."""
    buffers: list[weakref.ref[torch.UntypedStorage]] = []
    empty = rig.engine.compute.empty

    def watched(nbytes: int) -> torch.Tensor:
        buffer = empty(nbytes)
        buffers.append(weakref.ref(buffer.untyped_storage()))
        return buffer

    monkeypatch.setattr(rig.engine.compute, "empty", watched)
    group, saved, contents = rig.offload(2 * SLOT)
    rig.release()
    assert eventually(lambda: rig.counters.moved["gds_write"] == 2 * SLOT)
    rig.store.go_on = threading.Event()
    with interrupted(), rig.engine.lock:
        rig.engine.glimpse(saved[0])
    rig.store.go_on.set()
    assert eventually(lambda: rig.counters.moved["gds_read"] == 2 * SLOT)
    gc.collect()
    assert buffers[0]() is not None
    assert torch.equal(rig.back(saved[0]), contents[0])
    del group, saved
    rig.forget()
    gc.collect()
    assert buffers[0]() is None and eventually(lambda: rig.store.used == 0)


def test_a_group_whose_end_is_interrupted_leaves_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    group, *_ = rig.offload(2 * SLOT)
    rig.release()
    with rig.engine.lock:
        rig.engine._bring(group)
        assert group.stored is not None and group.stored.returned is not None
        group.stored.returned.synchronize()
    with monkeypatch.context() as patch:
        patch.setattr(rig.engine.compute, "wait", raising(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            rig.forget()
    assert group.state is State.GONE and group.buffer is None and rig.engine.hbm.resident == 0
    assert eventually(lambda: rig.store.used == 0)


def test_an_end_that_is_interrupted_leaves_no_thread_and_no_slot(rig: Rig) -> None:
    rig.store.go_on = threading.Event()
    group, *_ = rig.offload(9 * SLOT)
    with interrupted():
        rig.direct.close()
    rig.store.go_on.set()
    assert eventually(lambda: not any(thread.is_alive() for thread in rig.direct._threads))
    rig.direct.close()
    assert eventually(lambda: all(ring._freed for ring in rig.rings))
    assert group.members  # what did not get into a slot is where it was


def test_only_what_is_for_nvme_goes_the_direct_way(rig: Rig) -> None:
    for tier in ("dram", None):
        rig.offload(SLOT, tier=tier)
    assert rig.counters.moved["gds_write"] == 0 and rig.counters.moved["d2h"] == 2 * SLOT


def test_a_graph_that_dies_meanwhile_gives_memory_slots_and_extents_back(rig: Rig) -> None:
    rig.store.go_on = threading.Event()
    group, saved, _ = rig.offload(9 * SLOT)
    memory = weakref.ref(saved[0].alias.untyped_storage())
    del saved, group
    rig.forget()
    gc.collect()
    assert memory() is not None  # a thread is still to copy from it
    assert rig.counters.stalls == {}
    rig.store.go_on.set()
    assert eventually(lambda: rig.forget() or memory() is None)
    assert eventually(lambda: rig.store.used == 0)
    rig.store.go_on = None
    _, saved, contents = rig.offload(9 * SLOT)  # the slots are there again
    rig.release()
    assert torch.equal(rig.back(saved[0]), contents[0])
    rig.forget()
    assert eventually(lambda: rig.store.used == 0)


def test_memory_is_released_once_it_is_in_slots_though_the_drive_is_still_at_work(rig: Rig) -> None:
    rig.store.go_on = threading.Event()
    group, saved, contents = rig.offload(SLOT)  # a slot is free
    rig.release()
    assert group.state is State.AWAY and not group.members
    rig.store.go_on.set()
    assert torch.equal(rig.back(saved[0]), contents[0])


def test_the_end_waits_for_what_is_under_way(rig: Rig) -> None:
    rig.offload(20 * SLOT)
    rig.direct.close()
    rig.direct.close()
    assert rig.counters.moved["gds_write"] == 20 * SLOT


@pytest.mark.parametrize("mode", [None])  # the slot's memory stays registered, as it must
def test_a_slot_that_may_still_be_read_is_used_no_more(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copy failed, or says so: the next chunk in it would have been what came back."""
    _, saved, _ = rig.offload(SLOT)
    _, more, others = rig.offload(2 * SLOT)
    rig.release()
    refusing = threading.Event()
    refusing.set()
    synchronize, query = HostEvent.synchronize, HostEvent.query

    def refused(event: HostEvent) -> bool:
        return refusing.is_set() and threading.current_thread().name == "tiers-gds-read"

    def wait(event: HostEvent) -> None:
        if refused(event):
            raise RuntimeError("not permitted")
        synchronize(event)

    def ask(event: HostEvent) -> bool:
        if refused(event):
            raise RuntimeError("not permitted")
        return query(event)

    monkeypatch.setattr(HostEvent, "synchronize", wait)
    monkeypatch.setattr(HostEvent, "query", ask)
    rig.back(saved[0])
    assert torch.equal(rig.back(more[0]), others[0])  # in the two slots that are left
    refusing.clear()
