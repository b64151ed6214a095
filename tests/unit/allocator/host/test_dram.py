from __future__ import annotations

import ctypes
import gc
import logging
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.unit.by_hand import eventually
from torch_tiers.allocator.host import dram, mappings
from torch_tiers.allocator.host.dram import DramArena, DramBlock
from torch_tiers.allocator.host.pinning import PinningRefused, map_pages, touch
from torch_tiers.allocator.host.room import FRESH, Room
from torch_tiers.allocator.sizes import PAGE, MiB

STEP = 4 * PAGE


@pytest.fixture
def arena() -> Iterator[DramArena]:
    arena = DramArena(16 * PAGE, pinned=False, step=STEP)
    yield arena
    arena.close()


def take(arena: DramArena, nbytes: int) -> DramBlock:
    block = arena.allocate(nbytes)
    assert block is not None
    return block


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_a_block_is_exactly_as_long_as_asked_for(arena: DramArena) -> None:
    block = take(arena, PAGE + 3)
    assert (block.nbytes, block.tensor.numel(), block.padded.numel()) == (PAGE + 3, PAGE + 3, 2 * PAGE)
    assert (block.tensor.dtype, block.tensor.dim()) == (torch.uint8, 1)
    assert block.tensor.data_ptr() == block.padded.data_ptr()


def test_a_block_begins_on_a_page(arena: DramArena) -> None:
    assert [take(arena, n).tensor.data_ptr() % PAGE for n in (1, PAGE, PAGE + 1, 5)] == [0] * 4


def test_blocks_do_not_overlap(arena: DramArena) -> None:
    blocks = [take(arena, PAGE + 1) for _ in range(4)]
    for value, block in enumerate(blocks):
        block.padded.fill_(value)
    assert [int(block.padded.unique()) for block in blocks] == [0, 1, 2, 3]


def test_it_grows_in_steps(arena: DramArena) -> None:
    take(arena, 1)
    assert (arena.grown, arena.used) == (STEP, PAGE)


def test_a_request_above_the_step_is_one_mapping(arena: DramArena) -> None:
    assert take(arena, 2 * STEP).padded.numel() == arena.grown == 2 * STEP


def test_the_last_step_is_cut_to_the_capacity() -> None:
    arena = DramArena(5 * PAGE + 1, pinned=False, step=STEP)
    take(arena, STEP)
    take(arena, 1)
    assert arena.grown == arena.capacity == 5 * PAGE


def test_a_full_arena_returns_none(arena: DramArena) -> None:
    blocks = [take(arena, PAGE) for _ in range(16)]
    assert arena.allocate(1) is None
    arena.free(blocks.pop())
    assert arena.allocate(1) is not None


def test_a_request_above_the_capacity_leaves_the_arena_as_it_was(arena: DramArena) -> None:
    assert arena.allocate(16 * PAGE + 1) is None
    assert (arena.grown, arena.used) == (0, 0)


def test_small_idle_steps_make_way_for_a_large_request(arena: DramArena) -> None:
    blocks = [take(arena, STEP) for _ in range(4)]
    for block in blocks:
        arena.free(block)
    assert take(arena, 4 * STEP).padded.numel() == 4 * STEP


def test_the_peak_remembers(arena: DramArena) -> None:
    blocks = [take(arena, PAGE) for _ in range(3)]
    for block in blocks:
        arena.free(block)
    assert (arena.used, arena.peak) == (0, 3 * PAGE)


def test_a_block_cannot_be_freed_twice(arena: DramArena) -> None:
    block = take(arena, 1)
    arena.free(block)
    with pytest.raises(ValueError, match="freed twice"):
        arena.free(block)


def test_reserving_grows_in_the_background(arena: DramArena) -> None:
    arena.reserve(10 * PAGE)
    assert eventually(lambda: arena.grown == 10 * PAGE)


def test_what_is_reserved_holds_as_many_blocks_as_were_reserved_for() -> None:
    """Steps of four pages have room for one block of three each, and would hold five of the eight."""
    arena = DramArena(25 * PAGE, pinned=False, step=4 * PAGE)
    arena.reserve(24 * PAGE, 3 * PAGE)
    assert eventually(lambda: arena.grown == 24 * PAGE)
    blocks = [arena.allocate(3 * PAGE) for _ in range(8)]
    assert all(blocks)
    arena.close()


def test_reserving_stops_at_the_capacity(arena: DramArena) -> None:
    arena.reserve(1000 * PAGE)
    assert eventually(lambda: arena.grown == arena.capacity)


def test_closing_stops_a_reservation(arena: DramArena, monkeypatch: pytest.MonkeyPatch) -> None:
    under_way = threading.Event()

    def slow_touch(pages: object) -> None:
        under_way.set()
        time.sleep(0.02)

    monkeypatch.setattr(mappings, "touch", slow_touch)
    arena = DramArena(1000 * PAGE, pinned=False, step=PAGE)
    arena.reserve(1000 * PAGE)
    under_way.wait()
    started = time.monotonic()
    arena.close()
    assert time.monotonic() - started < 2


def test_what_lies_idle_goes_back_after_a_while_and_comes_back_with_demand() -> None:
    arena = DramArena(16 * PAGE, pinned=False, step=STEP, idle_after=0.2)
    arena.reserve(8 * PAGE)
    assert eventually(lambda: arena.grown == 8 * PAGE)
    assert eventually(lambda: arena.grown == 0)
    time.sleep(2 * dram.LOOK_EVERY)
    assert arena.grown == 0  # the goal alone does not bring it back
    block = take(arena, PAGE)
    assert eventually(lambda: arena.grown == 8 * PAGE)
    assert eventually(lambda: arena.grown == STEP)  # the other step lies idle
    arena.free(block)
    arena.close()


class System:
    """How much memory there is besides the arena's."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.arena: DramArena | None = None

    def room(self) -> Room:
        return Room(self.nbytes - (self.arena.grown if self.arena else 0), "the others are many")


@pytest.fixture
def shared() -> Iterator[tuple[DramArena, System]]:
    """An arena of 100 pages in a system that has 16."""
    system = System(16 * PAGE)
    arena = system.arena = DramArena(100 * PAGE, pinned=False, step=PAGE, room=system.room)
    yield arena, system
    arena.close()


def settle() -> None:
    time.sleep(2 * FRESH)


def test_an_arena_takes_no_more_than_the_system_leaves_and_says_so_once(
    shared: tuple[DramArena, System], caplog: pytest.LogCaptureFixture
) -> None:
    arena, _ = shared
    blocks = []
    while block := arena.allocate(PAGE):
        blocks.append(block)
    assert arena.allocate(PAGE) is None
    assert (len(blocks), arena.grown, arena.capacity) == (16, 16 * PAGE, 16 * PAGE)
    assert [record.getMessage() for record in caplog.records] == [
        "dram stays at 32.0 MiB of 200.0 MiB for now: the others are many"
    ]


def test_it_grows_again_when_the_system_leaves_more(shared: tuple[DramArena, System]) -> None:
    arena, system = shared
    assert arena.allocate(17 * PAGE) is None
    system.nbytes = 40 * PAGE
    settle()
    take(arena, 17 * PAGE)
    assert arena.capacity == 40 * PAGE


def test_a_step_takes_a_part_of_what_is_left_as_others_may_be_taking_theirs() -> None:
    arena = DramArena(1000 * PAGE, pinned=False, step=100 * PAGE, room=lambda: Room(320 * PAGE, ""))
    take(arena, 1)
    assert arena.grown == 10 * PAGE
    take(arena, 30 * PAGE)
    assert arena.grown == 40 * PAGE
    arena.close()


def test_a_step_is_made_of_whole_requests() -> None:
    arena = DramArena(1000 * PAGE, pinned=False, step=100 * PAGE, room=lambda: Room(320 * PAGE, ""))
    take(arena, 4 * PAGE)
    assert arena.grown == 8 * PAGE
    arena.close()


def test_what_others_need_is_not_used_again_unless_there_is_no_other_way(shared: tuple[DramArena, System]) -> None:
    arena, system = shared
    for step in [take(arena, 4 * PAGE) for _ in range(3)]:
        arena.free(step)
    blocks = [take(arena, PAGE) for _ in range(12)]  # four to a step, so that none lies idle and goes back meanwhile
    system.nbytes = 8 * PAGE
    assert eventually(lambda: arena.capacity == 8 * PAGE)
    arena.free(blocks.pop())
    assert arena.allocate(PAGE) is None
    assert arena.allocate(PAGE, in_need=True) is not None


def test_what_the_program_takes_and_gives_back_all_the_time_is_no_reason_to_give_back() -> None:
    left = 16 * PAGE
    arena: DramArena | None = None
    arena = DramArena(
        100 * PAGE, pinned=False, step=PAGE, room=lambda: Room(left - (arena.grown if arena else 0), "", 2 * PAGE)
    )
    blocks = [take(arena, PAGE) for _ in range(16)]
    arena.free(blocks.pop())
    left = 14 * PAGE
    settle()
    time.sleep(2 * dram.LOOK_CLOSELY)
    assert (arena.grown, arena.capacity) == (16 * PAGE, 16 * PAGE)
    left = 13 * PAGE
    assert eventually(lambda: (arena.grown, arena.capacity) == (15 * PAGE, 15 * PAGE))
    arena.close()


def test_others_need_not_wait_long_for_what_is_idle(
    shared: tuple[DramArena, System], monkeypatch: pytest.MonkeyPatch
) -> None:
    arena, system = shared
    for block in [take(arena, PAGE) for _ in range(12)]:
        arena.free(block)
    settle()
    monkeypatch.setattr(dram, "LOOK_EVERY", 60.0)
    system.nbytes, began = 4 * PAGE, time.monotonic()
    assert eventually(lambda: arena.grown == 4 * PAGE)
    assert time.monotonic() - began < dram.LOOK_EVERY / 2


def test_what_is_idle_goes_back_when_others_need_it(shared: tuple[DramArena, System]) -> None:
    arena, system = shared
    blocks = [take(arena, PAGE) for _ in range(12)]
    for block in blocks[4:]:
        arena.free(block)
    system.nbytes = 9 * PAGE
    assert eventually(lambda: arena.grown == 9 * PAGE)
    system.nbytes = 2 * PAGE
    assert eventually(lambda: arena.grown == 4 * PAGE)  # the rest is in use
    assert arena.capacity == 2 * PAGE


def test_on_demand_it_gives_back_what_lies_idle_and_no_more_than_that(arena: DramArena) -> None:
    blocks = [take(arena, STEP) for _ in range(4)]
    for block in blocks[1:]:
        arena.free(block)
    assert arena.release_idle(PAGE) == STEP
    assert arena.release_idle(16 * PAGE) == STEP
    assert arena.grown == 2 * STEP, "what is in use, and two of the largest requests"
    assert arena.release_idle(PAGE) == 0
    take(arena, 3 * STEP)


def test_it_gives_nothing_back_while_another_thread_has_it_grow_for_long(
    arena: DramArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dram, "PATIENCE", 0.01)
    for block in [take(arena, STEP) for _ in range(3)]:
        arena.free(block)
    with arena._mappings.growing:
        assert arena.release_idle(PAGE) == 0
    assert arena.release_idle(PAGE) == STEP


def test_what_plans_have_reserved_is_not_released_though_it_lies_idle(arena: DramArena) -> None:
    """Between two periods all of it does; and the next one died for want of it."""
    arena.reserve(2 * STEP)
    for block in [take(arena, PAGE) for _ in range(16)]:
        arena.free(block)
    assert arena.grown == 4 * STEP
    assert arena.release_idle(16 * PAGE) == 2 * STEP
    assert arena.release_idle(16 * PAGE) == 0


def test_a_little_stays_for_what_is_on_disk(shared: tuple[DramArena, System]) -> None:
    arena, system = shared
    for block in [take(arena, 2 * PAGE) for _ in range(6)]:
        arena.free(block)
    system.nbytes = -PAGE
    assert eventually(lambda: arena.grown == 4 * PAGE)
    time.sleep(2 * dram.LOOK_EVERY)
    assert arena.allocate(2 * PAGE) is not None


def test_nobody_looks_after_an_arena_that_is_gone() -> None:
    arena = DramArena(16 * PAGE, pinned=False, step=STEP, idle_after=60)
    take(arena, PAGE)
    keeper = arena._keeper._thread
    assert keeper is not None and keeper.is_alive()
    del arena
    assert eventually(lambda: not keeper.is_alive())


def test_growth_is_resident_before_it_is_used() -> None:
    before = resident()
    arena = DramArena(64 * MiB, pinned=False, step=64 * MiB)
    take(arena, 1)
    assert resident() - before > 60 * MiB


def test_blocks_outlive_the_arena(arena: DramArena) -> None:
    block = take(arena, PAGE)
    view = block.tensor[5:10].fill_(7)
    arena.close()
    arena.close()
    arena.free(block)
    del block, arena
    gc.collect()
    assert view.tolist() == [7] * 5


def test_a_closed_arena_hands_out_nothing(arena: DramArena) -> None:
    take(arena, 1)
    arena.close()
    arena.reserve(STEP)
    assert arena.allocate(1) is None


def test_where_the_system_gives_no_more_the_capacity_is_reached(
    arena: DramArena, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    take(arena, STEP)

    def refuse(nbytes: int, node: int | None) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mappings, "map_pages", refuse)
    assert [arena.allocate(1), arena.allocate(1)] == [None, None]
    assert arena.capacity == STEP
    assert [record.message.count("Cannot allocate memory") for record in caplog.records] == [1]
    assert "TIERS_NVME takes what does not fit" in caplog.text


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand in for the driver: each request to pin is refused with the next of these ('' grants it)."""
    answers: list[str] = []

    def pin(pages: object, device: int) -> None:
        if answers and (reason := answers.pop(0)):
            raise PinningRefused(reason)

    monkeypatch.setattr(mappings, "pin", pin)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return answers


def test_where_nothing_may_be_pinned_it_goes_on_unpinned_and_says_so(
    driver: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    driver.append("operation not permitted")
    arena = DramArena(2 * PAGE, pinned=True, step=PAGE)
    take(arena, 1), take(arena, 1)
    assert not arena.pinned
    assert [record.message.count("operation not permitted") for record in caplog.records] == [1]
    assert "to pin less, lower TIERS_DRAM" in caplog.text


def test_where_no_more_may_be_pinned_the_capacity_is_reached(
    driver: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    driver.extend(["", "out of memory"])
    arena = DramArena(8 * PAGE, pinned=True, step=PAGE)
    take(arena, 1)
    assert arena.allocate(1) is None
    assert arena.pinned
    assert arena.capacity == PAGE
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_many_threads_share_it_within_the_cap(seed: int) -> None:
    arena = DramArena(32 * PAGE, pinned=False, step=STEP)
    failures: list[object] = []

    def work(worker: int) -> None:
        rng = random.Random(seed + worker)
        held: list[DramBlock] = []
        for _ in range(300):
            if held and rng.random() < 0.5:
                block = held.pop(rng.randrange(len(held)))
                if int(block.tensor[0]) != worker or int(block.tensor[-1]) != worker:
                    failures.append(worker)
                arena.free(block)
            elif block := arena.allocate(rng.randrange(1, 3 * PAGE)):
                block.tensor[0] = block.tensor[-1] = worker
                held.append(block)
        for block in held:
            arena.free(block)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert arena.used == 0
    assert arena.grown <= arena.capacity
    assert arena.peak <= arena.capacity


def test_mapped_pages_are_zero_and_aligned() -> None:
    memory = torch.frombuffer(map_pages(PAGE), dtype=torch.uint8)
    assert memory.data_ptr() % PAGE == 0
    assert not memory.any()


def test_pages_prefer_the_node_that_is_named() -> None:
    maps = Path("/proc/self/numa_maps")
    if not maps.exists():
        pytest.skip("this kernel knows no NUMA nodes")
    pages = map_pages(PAGE, 0)
    touch(pages)
    policies = {int(line.split()[0], 16): line.split()[1] for line in maps.read_text().splitlines()}
    assert policies[ctypes.addressof(pages)] == "prefer:0"


def test_a_node_that_is_not_there_is_no_obstacle() -> None:
    assert ctypes.sizeof(map_pages(PAGE, 63)) == PAGE


def test_an_exiting_program_does_not_wait_for_a_long_reservation() -> None:
    program = (
        "from torch_tiers.allocator.host import dram, mappings; import time\n"
        "mappings.touch = lambda pages: time.sleep(0.05)\n"
        "dram.DramArena(4096 << 20, pinned=False, step=2 << 20).reserve(4096 << 20)\n"
    )
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert time.monotonic() - started < 30  # it would be 100 s


def test_what_it_once_had_can_be_had_again_after_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lay idle and went back; one moment without memory then ended the tier for good."""
    arena, now = DramArena(16 * PAGE, pinned=False, step=STEP), [time.monotonic()]
    monkeypatch.setattr(mappings.time, "monotonic", lambda: now[0])
    arena.free(take(arena, STEP))
    with arena._mappings.growing, arena._mappings.lock:
        arena._mappings.drop(list(arena._mappings))
    assert arena.grown == 0
    with monkeypatch.context() as patch:
        patch.setattr(mappings, "map_pages", mock.Mock(side_effect=OSError(12, "Cannot allocate memory")))
        assert arena.allocate(PAGE) is None
    assert arena.allocate(PAGE) is None, "it is not asked for with every group"
    now[0] += mappings.AGAIN
    take(arena, PAGE)
    assert arena.capacity == STEP
    arena.close()


def test_what_lay_scattered_is_had_in_one_piece_right_after_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was given up for that: not to ask for it again would lose it."""
    arena = DramArena(4 * STEP, pinned=False, step=STEP)
    blocks = [take(arena, STEP) for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(mappings, "map_pages", mock.Mock(side_effect=OSError(12, "Cannot allocate memory")))
        assert arena.allocate(STEP) is None
    for block in blocks:
        arena.free(block)
    take(arena, 2 * STEP)
    arena.close()
