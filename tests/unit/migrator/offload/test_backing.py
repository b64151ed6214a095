from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
import torch

from tests.unit.by_hand import HandStore, eventually
from tests.unit.migrator.offload.rig import dram_alone
from tests.unit.store_faults import FaultyFile, fail
from torch_tiers.allocator.errors import StoreError, TierFull
from torch_tiers.allocator.host.dram import DramArena, DramBlock
from torch_tiers.allocator.host.room import Room
from torch_tiers.allocator.nvme.posix import PosixFile
from torch_tiers.allocator.nvme.store import NvmeStore
from torch_tiers.allocator.sizes import PAGE, KiB, MiB
from torch_tiers.migrator.offload.backing import Backing
from torch_tiers.migrator.offload.guards import GUARDS
from torch_tiers.migrator.offload.stored import StoredGroup
from torch_tiers.migrator.streams import Event
from torch_tiers.migrator.streams.host import HostEvent
from torch_tiers.migrator.telemetry.counters import Counters

NBYTES = PAGE - 5 * KiB  # a page of DRAM, and a tail that no disk block ends with

Make = Callable[..., Backing]
TakeAll = Callable[[], list[DramBlock]]


def passed() -> HostEvent:
    event = HostEvent()
    event.set()
    return event


@pytest.fixture
def arena() -> Iterator[DramArena]:
    arena = DramArena(8 * PAGE, pinned=False, step=8 * PAGE)
    yield arena
    arena.close()


@pytest.fixture
def make(arena: DramArena) -> Iterator[Make]:
    """Makes backings on `arena`; whatever a test leaves of them must close without help."""
    made: list[tuple[Backing, HandStore | None]] = []

    def make(store: HandStore | None = None, counters: Counters | None = None) -> Backing:
        backing = Backing(arena, store, counters or Counters())  # type: ignore[arg-type]
        made.append((backing, store))
        return backing

    yield make
    for backing, store in made:
        if store is not None:
            store.finish()
        backing.close()


@pytest.fixture
def take_all(arena: DramArena) -> Iterator[TakeAll]:
    """Takes all that is left of DRAM, and at the end of the test gives back what is still taken."""
    taken: list[DramBlock] = []

    def take() -> list[DramBlock]:
        while (block := arena.allocate(PAGE)) is not None:
            taken.append(block)
        return taken

    yield take
    for block in taken:
        arena.free(block)


def test_dram_grows_ahead_to_what_all_owners_need() -> None:
    with dram_alone(64) as (backing, arena):
        owner, other = Owner(), Owner()
        backing.reserve(owner, 4 * PAGE)
        backing.reserve(other, 12 * PAGE)
        assert eventually(lambda: arena.grown == 17 * PAGE)  # and one part in sixteen for the ends
        backing.reserve(owner, 20 * PAGE)
        assert eventually(lambda: arena.grown == 34 * PAGE)


def test_nothing_goes_to_disk_where_dram_holds_all_that_plans_keep_in_it(make: Make, arena: DramArena) -> None:
    """A GPT with 4 GiB of DRAM, of which its plan fills 3.4, wrote some of that each step, and read it back."""
    store, owner = HandStore(capacity=64 * PAGE), Owner()
    backing = make(store)
    backing.reserve(owner, 8 * NBYTES)
    for number in range(8):
        put(backing, number, number)
    assert arena.used == 8 * PAGE
    assert not store.writes


def test_without_a_disk_what_others_need_is_used_on() -> None:
    """It cannot be given back, and a run that could go on must not fail for it."""
    left = 128 * PAGE
    with dram_alone(4, step=4 * PAGE, room=lambda: Room(left, "")) as (backing, arena):
        stored_groups = [backing.new(PAGE, k) for k in range(4)]
        left = -4 * PAGE
        assert eventually(lambda: arena.capacity == 0)
        backing.drop(stored_groups.pop())
        assert arena.allocate(PAGE) is None
        assert backing.new(PAGE, 4).block is not None
        with pytest.raises(TierFull):
            backing.new(PAGE, 5)


class Owner:
    """Whoever moves something."""


def put(backing: Backing, value: int, next_use: int, nbytes: int = NBYTES) -> StoredGroup:
    """A stored group whose copy from HBM is over."""
    stored = backing.new(nbytes, next_use)
    for event in stored.after:
        event.synchronize()
    assert stored.block is not None
    stored.block.tensor.fill_(value)
    stored.filled = passed()
    return stored


def contents(backing: Backing, stored: StoredGroup, lent: Event | None = None) -> set[int]:
    """What is copied back to HBM, as the set of its bytes."""
    seen: list[torch.Tensor] = []

    def copy(block: DramBlock) -> Event:
        seen.append(block.tensor.clone())
        return lent or passed()

    backing.lend(stored, copy)
    assert seen[0].numel() == stored.nbytes
    return set(seen[0].unique().tolist())


def on_disk_only(stored: StoredGroup) -> bool:
    return stored.block is None and stored.extent is not None


def fill(backing: Backing, count: int) -> list[StoredGroup]:
    """Parcels 0, 1, ..., of which the first is needed last."""
    return [put(backing, value=number, next_use=-number) for number in range(count)]


def settle(backing: Backing, stored_groups: list[StoredGroup]) -> None:
    """Wait until the disk is idle and what it has written is out of DRAM."""
    assert eventually(lambda: not any(stored.on_disk_lane() for stored in stored_groups))
    backing.read_ahead(stored_groups[-1])  # needed first, so it is in DRAM, and nothing is read


def settled(make: Make, count: int) -> tuple[Backing, HandStore, list[StoredGroup]]:
    """What `fill` makes, on a disk that is done with it."""
    store = HandStore(100 * MiB, at_once=True)
    backing = make(store)
    stored_groups = fill(backing, count)
    settle(backing, stored_groups)
    return backing, store, stored_groups


def one_is_written(make: Make, counters: Counters | None = None) -> tuple[Backing, HandStore, list[StoredGroup]]:
    """What `fill` makes, with a page of DRAM left: room is made, on a disk that moves when told to."""
    store = HandStore(100 * MiB)
    backing = make(store, counters)
    stored_groups = fill(backing, 7)
    assert eventually(lambda: len(store.writes) == 1)
    return backing, store, stored_groups


def written(stored: StoredGroup) -> bool:
    return eventually(lambda: stored.writing is None or stored.writing.done())


# ------------------------------------------------------------------------------------------ dram first


def test_a_stored_group_begins_in_dram_and_leaves_nothing_once_it_is_dropped(make: Make, arena: DramArena) -> None:
    store = HandStore(100 * MiB)
    backing = make(store)
    stored = put(backing, 1, 0)
    assert stored.block is not None and stored.block.nbytes == NBYTES
    assert (arena.used, store.used) == (PAGE, 0)
    backing.drop(stored)
    assert arena.used == 0


def test_without_nvme_a_full_dram_says_so(make: Make, arena: DramArena) -> None:
    backing = make()
    fill(backing, 8)
    with pytest.raises(TierFull, match=r"^tier dram is full: 2\.0 MiB requested, 16\.0 MiB of 16\.0 MiB in use"):
        backing.new(NBYTES, 0)
    assert arena.used == 8 * PAGE


# ------------------------------------------------------------------------------------------ then nvme


def test_what_is_needed_last_is_written_first(make: Make) -> None:
    backing = make(HandStore(100 * MiB, at_once=True))
    stored_groups = fill(backing, 12)
    assert [on_disk_only(stored) or stored.writing is not None for stored in stored_groups] == [True] * 6 + [False] * 6


def test_what_is_not_filled_yet_is_not_written(make: Make) -> None:
    store = HandStore(100 * MiB)
    backing = make(store)
    for number in range(8):
        backing.new(NBYTES, number)
    assert store.used == 0
    with pytest.raises(TierFull):
        backing.new(NBYTES, 0)


def test_a_write_waits_for_the_copy_that_fills_its_block(make: Make) -> None:
    store = HandStore(100 * MiB, at_once=True)
    backing = make(store)
    stored = backing.new(NBYTES, 99)
    stored.filled = filling = HostEvent()
    fill(backing, 6)
    assert stored.writing is not None
    assert store.writes == []
    assert stored.block is not None
    stored.block.tensor.fill_(7)
    filling.set()
    assert eventually(stored.writing.done)
    backing.read_ahead(stored)  # looks after what is written
    assert contents(backing, stored) == {7}


def test_what_was_written_comes_back_and_is_not_written_again(make: Make) -> None:
    backing, store, stored_groups = settled(make, 20)
    assert sum(on_disk_only(stored) for stored in stored_groups) >= 12
    for _ in range(2):
        assert [contents(backing, stored) for stored in stored_groups] == [{number} for number in range(20)]
    assert len(store.writes) <= len(stored_groups)


def test_reading_ahead_pushes_nothing_out(make: Make, arena: DramArena, take_all: TakeAll) -> None:
    backing, _, (first, *_) = settled(make, 12)
    rest = take_all()
    assert on_disk_only(first)
    assert not backing.read_ahead(first)
    assert first.block is None
    arena.free(rest.pop())
    assert backing.read_ahead(first)
    assert eventually(lambda: first.at_hand())


def test_waits_for_the_disk_are_counted(make: Make, take_all: TakeAll) -> None:
    backing, store, stored_groups = one_is_written(make, counters := Counters())
    timer = threading.Timer(0.05, store.writes[0].set_result, (None,))
    timer.start()
    take_all()
    other = backing.new(NBYTES, 0)
    assert counters.stalls["disk_write"].count == 1
    assert other.block is not None and on_disk_only(stored_groups[0])
    timer.join()
    store.finish()
    backing.close()
    assert counters.moved["disk_write"] >= NBYTES


# ------------------------------------------------------------------------ given back too early: never


def test_a_block_is_not_given_back_while_it_is_written(make: Make, arena: DramArena) -> None:
    backing, store, stored_groups = one_is_written(make)
    for stored in stored_groups:
        backing.drop(stored)
    assert (arena.used, store.used) == (PAGE, 2 * MiB - 4 * KiB)
    store.writes[0].set_result(None)
    assert written(stored_groups[0])
    backing.drop(put(backing, 1, 0))
    assert (arena.used, store.used) == (0, 0)


def test_a_block_is_not_given_back_while_it_is_read_into(make: Make, arena: DramArena) -> None:
    backing, store, stored_groups = one_is_written(make)
    store.writes[0].set_result(None)
    for stored in stored_groups[1:]:
        backing.drop(stored)
    assert written(stored_groups[0])
    assert backing.read_ahead(stored_groups[0]) and eventually(lambda: len(store.reads) == 1)
    backing.drop(stored_groups[0])
    assert arena.used == PAGE
    store.reads[0].set_result(None)
    assert eventually(lambda: not stored_groups[0].on_disk_lane())
    backing.drop(put(backing, 1, 0))
    assert (arena.used, store.used) == (0, 0)


@pytest.mark.parametrize("over", [False, True], ids=["under_way", "over"])
@pytest.mark.parametrize("copy", ["filled", "returned"])
def test_whoever_gets_a_block_waits_for_a_copy_only_while_it_touches_it(make: Make, copy: str, over: bool) -> None:
    backing = make()
    stored_groups = fill(backing, 8)
    touching = HostEvent()
    setattr(stored_groups[3], copy, touching)
    backing.drop(stored_groups[3])
    if over:
        touching.set()
    assert list(backing.new(NBYTES, 0).after) == ([] if over else [touching])


def test_copies_far_behind_the_host_are_not_all_asked_about_with_each_stored_group() -> None:
    """A query is a call of the driver's: with hundreds of copies under way a group took milliseconds of the host's."""

    class Behind(HostEvent):
        asked = 0

        def query(self) -> bool:
            Behind.asked += 1
            return False

    count = 8 * GUARDS
    with dram_alone(2 * count, step=2 * count * PAGE) as (backing, _):
        stored_groups = [backing.new(PAGE, k) for k in range(count)]
        for stored in stored_groups:
            stored.filled = stored.returned = Behind()
            backing.drop(stored)
        Behind.asked = 0
        more = [backing.new(2 * PAGE, k) for k in range(GUARDS)]
        overlapping = sum(len(stored.after) for stored in more)
        assert Behind.asked <= overlapping + count


def test_memory_is_not_read_into_while_a_copy_still_touches_it(make: Make, take_all: TakeAll) -> None:
    backing, store, (first, *_, last) = settled(make, 12)
    assert on_disk_only(first)
    take_all()
    under_way = last.returned = HostEvent()
    backing.drop(last)
    reads = len(store.reads)
    assert backing.read_ahead(first)
    assert not first.at_hand()
    assert len(store.reads) == reads
    under_way.set()
    assert eventually(lambda: first.at_hand())


def test_nobody_takes_a_block_away_while_it_is_being_lent(make: Make, take_all: TakeAll) -> None:
    """The engine of another thread looks for room at the very moment a copy out of a block is queued."""
    backing, _, stored_groups = settled(make, 12)
    contents(backing, stored_groups[0])  # in DRAM and on NVMe: the cheapest to take away
    assert stored_groups[0].block is not None
    take_all()
    found: list[StoredGroup] = []
    other = threading.Thread(target=lambda: found.append(backing.new(NBYTES, 0)))
    lent = HostEvent()

    def copy(block: DramBlock) -> Event:
        other.start()
        other.join(0.1)
        assert found == [] or found[0].block.tensor.data_ptr() != block.tensor.data_ptr()  # type: ignore[union-attr]
        return lent

    backing.lend(stored_groups[0], copy)
    other.join(10)
    assert stored_groups[0].block is None  # taken now, by one who knows of the copy
    assert lent in found[0].after
    lent.set()


# ------------------------------------------------------------------------------------------- bad days


def test_full_tiers_are_both_named_and_what_is_on_nvme_can_still_come_back(make: Make, arena: DramArena) -> None:
    """One block stays free for that: with the last one taken, backward would find no way to read what it needs."""
    store = HandStore(2 * NBYTES + 8 * KiB, at_once=True)
    backing, stored_groups = make(store), []
    with pytest.raises(
        TierFull, match=r"^tier dram and nvme at /somewhere is full: 2\.0 MiB requested, 18\.0 MiB of 20"
    ):
        for number in range(11):
            stored_groups.append(put(backing, value=number, next_use=-number))
    assert arena.used == 7 * PAGE
    for number, stored in reversed(list(enumerate(stored_groups))):
        assert contents(backing, stored) == {number}


def test_what_backward_needs_comes_back_through_memory_beyond_a_full_dram(
    make: Make, arena: DramArena, take_all: TakeAll, caplog: pytest.LogCaptureFixture
) -> None:
    backing = make(HandStore(100 * MiB, at_once=True))
    stored_groups = [put(backing, value=number, next_use=0) for number in range(2)]
    for stored in stored_groups:
        stored.tier = "nvme"
        backing.filled(stored)
    other = put(backing, 9, 0)
    settle(backing, [*stored_groups, other])
    assert all(map(on_disk_only, stored_groups))
    backing.drop(other)
    taken = take_all()
    assert [contents(backing, stored) for stored in stored_groups] == [{0}, {1}]
    assert len([text for text in caplog.messages if "beyond" in text]) == 1
    for stored in stored_groups:
        backing.drop(stored)
    assert arena.used == len(taken) * PAGE


def test_no_block_stays_free_for_a_large_one_that_is_gone(make: Make) -> None:
    backing = make(HandStore(4 * NBYTES, at_once=True))
    backing.drop(put(backing, 0, 0, nbytes=4 * PAGE))
    stored_groups = fill(backing, 10)  # of twelve, less the page that has to stay free and what a write takes
    assert len(stored_groups) == 10


def test_what_is_dropped_while_it_is_written_is_in_nobody_s_way(make: Make) -> None:
    """The disk may still be at it; nothing that lives lies there."""
    store = HandStore(NBYTES + 8 * KiB)
    backing = make(store)
    stored_groups = fill(backing, 8)
    written = next(stored for stored in stored_groups if stored.writing)
    backing.drop(written)
    backing.drop(next(stored for stored in stored_groups if stored is not written))
    store.finish()
    put(backing, 9, 0)


def test_what_is_larger_than_dram_is_not_the_fault_of_nvme(make: Make) -> None:
    backing = make(HandStore(100 * MiB))
    with pytest.raises(TierFull, match=r"^tier dram is full: 18\.0 MiB requested"):
        backing.new(9 * PAGE, 0)


def test_a_write_that_fails_leaves_the_bytes_in_dram_and_is_not_tried_again(make: Make) -> None:
    backing, store, stored_groups = one_is_written(make)
    store.writes[0].set_exception(StoreError("/somewhere", 0, NBYTES, "write", "no space left"))
    settle(backing, stored_groups)
    assert store.used == 0
    assert contents(backing, stored_groups[0]) == {0}
    fill(backing, 1)
    assert eventually(lambda: len(store.writes) >= 2)
    assert stored_groups[0].writing is None
    assert stored_groups[1].writing is not None


def test_any_error_of_a_write_keeps_the_bytes(make: Make) -> None:
    backing, store, stored_groups = one_is_written(make)
    store.writes[0].set_exception(RuntimeError("a bug"))
    assert written(stored_groups[0])
    with pytest.raises(RuntimeError, match="a bug"):
        backing.read_ahead(stored_groups[0])
    assert stored_groups[0].extent is None  # nothing lies there, so it is no copy that the block could be given up for
    assert contents(backing, stored_groups[0]) == {0}


def test_an_error_of_another_group_s_write_leaks_no_block_of_a_new_group(make: Make, arena: DramArena) -> None:
    store = HandStore(3 * PAGE)
    backing = make(store)
    backing.reserve(owner := Owner(), 8 * NBYTES)  # nothing is written ahead
    large, small = put(backing, 0, 0, nbytes=2 * PAGE), put(backing, 1, 0)
    large.tier = small.tier = "nvme"
    backing.filled(large)
    assert eventually(lambda: len(store.writes) == 1)
    backing.filled(small)
    assert eventually(lambda: len(store.writes) == 2)
    store.writes[0].set_result(None)
    assert written(large)
    backing.read_ahead(small)  # looks after what is written
    assert on_disk_only(large)
    store.writes[1].set_exception(RuntimeError("a bug"))
    assert written(small)
    taken = [arena.allocate(PAGE) for _ in range(6)]  # but for one, which the large group could not come back into
    used = arena.used
    with pytest.raises(RuntimeError, match="a bug"):
        backing.new(NBYTES, 0)
    assert arena.used == used == 7 * PAGE
    for block in taken:
        assert block is not None
        arena.free(block)
    del owner


def test_a_read_that_fails_is_an_error_and_leaks_nothing(make: Make, arena: DramArena) -> None:
    backing, store, stored_groups = one_is_written(make)
    store.writes[0].set_result(None)
    assert written(stored_groups[0])
    assert backing.read_ahead(stored_groups[0]) and eventually(lambda: len(store.reads) == 1)
    store.reads[0].set_exception(StoreError("/somewhere", 0, NBYTES, "read", "bad sector"))
    with pytest.raises(StoreError, match=r"cannot read .* bad sector"):
        contents(backing, stored_groups[0])
    for stored in stored_groups:
        backing.drop(stored)
    assert (arena.used, store.used) == (0, 0)


def test_a_stored_group_that_is_needed_waits_for_a_read_rather_than_fail(make: Make, arena: DramArena) -> None:
    """All of DRAM is being read into, and backward asks for another stored group first."""
    backing, store, stored_groups = settled(make, 20)
    for stored in stored_groups[9:]:
        backing.drop(stored)
    store.at_once = False
    assert all([backing.read_ahead(stored) for stored in stored_groups[:8]])
    assert arena.used == 8 * PAGE
    lending = threading.Thread(target=contents, args=(backing, stored_groups[8]))
    lending.start()
    for number in range(9):
        assert eventually(lambda number=number: len(store.reads) > number)  # type: ignore[misc]
        store.reads[number].set_result(None)
    lending.join(10)
    assert stored_groups[8].returned is not None


# -------------------------------------------------------------------------------------- on a real disk


def random_life(backing: Backing, rng: Random, steps: int) -> None:
    """Parcels come, are read ahead, are lent and go in any order; every byte that is lent is checked."""
    alive: dict[StoredGroup, int] = {}
    for step in range(steps):
        action = rng.random()
        if not alive or (action < 0.4 and len(alive) < 20):
            value = step % 251
            alive[put(backing, value, rng.randrange(100), rng.randrange(1, 2 * PAGE))] = value
            continue
        stored = rng.choice(list(alive))
        if action < 0.5:
            backing.read_ahead(stored)
        elif action < 0.75:
            assert contents(backing, stored) == {alive[stored]}
        else:
            backing.drop(stored)
            del alive[stored]
    for stored, value in alive.items():
        assert contents(backing, stored) == {value}
        backing.drop(stored)


def test_any_order_of_stored_groups_on_a_real_disk_loses_and_leaks_nothing(
    arena: DramArena, tmp_path: Path, seed: int
) -> None:
    store = NvmeStore([tmp_path], 128 * MiB, gds="off", stripe=MiB, step=16 * MiB)
    counters = Counters()
    backing = Backing(arena, store, counters)
    random_life(backing, Random(seed), 120)
    backing.close()
    assert (arena.used, store.used) == (0, 0)
    assert min(counters.moved["disk_write"], counters.moved["disk_read"]) > 0
    store.close()


def test_a_disk_that_breaks_loses_nothing_that_is_in_dram(arena: DramArena, tmp_path: Path) -> None:
    faults = {number: fail(errno.EIO) for number in range(4, 1000)}
    store = NvmeStore(
        [tmp_path],
        128 * MiB,
        gds="off",
        stripe=MiB,
        step=16 * MiB,
        backend=lambda path: FaultyFile(PosixFile(path), writes=faults),
    )
    backing = Backing(arena, store, Counters())
    stored_groups: list[StoredGroup] = []
    with pytest.raises(TierFull, match=r"^tier dram and nvme at .* is full"):
        while True:
            stored_groups.append(put(backing, len(stored_groups), -len(stored_groups)))
    assert len(stored_groups) > 8  # all of DRAM, and what was written before
    for number, stored in reversed(list(enumerate(stored_groups))):  # as backward does
        assert contents(backing, stored) == {number}
        backing.drop(stored)
    backing.close()
    assert (arena.used, store.used) == (0, 0)
    store.close()


def test_what_lies_on_a_closed_disk_is_an_error_and_no_hang(arena: DramArena, tmp_path: Path) -> None:
    store = NvmeStore([tmp_path], 128 * MiB, gds="off", stripe=MiB, step=16 * MiB)
    backing = Backing(arena, store, Counters())
    stored_groups = fill(backing, 12)
    settle(backing, stored_groups)
    backing.close()
    store.close()
    assert on_disk_only(stored_groups[0])
    with pytest.raises(Exception, match="session is over"):
        contents(backing, stored_groups[0])
    assert contents(backing, stored_groups[11]) == {11}


def test_what_another_engine_is_writing_out_is_not_written_out_again(make: Make) -> None:
    store = HandStore(8 * PAGE)
    backing = make(store)
    stored = backing.new(NBYTES, 1, "nvme")
    stored.filled = passed()
    with backing._lock:
        assert backing._demote() is stored  # of another device, for which DRAM ran short
    backing.filled(stored)
    backing.drop(stored)
    store.finish()
    backing.close()
    assert store.used == 0


def test_memory_that_a_copy_still_reads_is_held(arena: DramArena, make: Make) -> None:
    backing, lent = make(), HostEvent()
    stored = backing.new(PAGE, 1)
    stored.filled = passed()
    backing.lend(stored, lambda block: lent)
    assert stored.block is not None
    held = stored.block.tensor.data_ptr()
    backing.drop(stored)
    assert [guard[3].data_ptr() for guard in backing._guards._kept] == [held]
    lent.set()
    other = backing.new(PAGE, 2)
    other.filled = passed()
    backing.lend(other, lambda block: HostEvent())
    backing.drop(other)
    assert [guard[2].query() for guard in backing._guards._kept] == [False]
