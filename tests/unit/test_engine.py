from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from allocator.dram import DramArena
from allocator.errors import TierFull
from allocator.nvme.store import NvmeStore
from allocator.sizes import PAGE, KiB, MiB
from migrator.actions import Pace
from migrator.backing import Backing
from migrator.counters import Counters
from migrator.engine import Engine
from migrator.group import Group, State
from migrator.lanes import SLOT
from migrator.lanes.host import HostCompute, HostLane
from migrator.tensors import Saved
from tests.unit.by_hand import HandLane, HandStore, StreamCompute

NBYTES = 64 * KiB


graph: list[Held] = []
"""All that the graph holds: a test need not."""


class Held:
    """A saved tensor, as the graph holds it."""

    def __init__(self, engine: Engine, group: Group, tensor: torch.Tensor, saved: Saved | None = None) -> None:
        self.engine = engine
        self.group = group
        self.expected = tensor.clone()
        self.memory = StorageWeakRef(tensor.untyped_storage())
        self.saved = saved or engine.add(group, tensor, 0, tensor.numel())
        self.was_used = False
        self.claim = engine.hold(self.saved)
        graph.append(self)

    def use(self) -> torch.Tensor:
        """Backward asks for it."""
        engine = self.engine
        with engine.lock:
            engine.collect()
            buffer = engine.source(self.saved)
            if not self.was_used:
                self.was_used = True
                engine.used(self.group)
            if engine.unsettled:
                engine.prefetch()
        if buffer is None:
            return self.saved.alias.detach()
        return buffer[self.saved.offset : self.saved.offset + self.saved.nbytes]

    def die(self) -> None:
        """The graph lets go of it; the engine learns of it when it looks."""
        graph.remove(self)
        del self.claim, self.saved


class Rig:
    """An engine whose lanes move when told to."""

    def __init__(self, dram: int = 16 * MiB, store: HandStore | None = None) -> None:
        self.arena = DramArena(dram, pinned=False, step=dram)
        self.backing = Backing(self.arena, store, Counters())  # type: ignore[arg-type]
        self.compute = StreamCompute()
        self.out, self.back = HandLane(), HandLane()
        self.engine = Engine(self.compute, self.out, self.back, self.backing)
        self.engine.limit = 0

    def group(self, next_use: int = 0) -> Group:
        return Group(next_use, self.compute.stream())

    def held(self, group: Group, nbytes: int = NBYTES, value: int | None = None) -> Held:
        tensor = (
            torch.randint(256, (nbytes,), dtype=torch.uint8)
            if value is None
            else torch.full((nbytes,), value, dtype=torch.uint8)
        )
        return Held(self.engine, group, tensor)

    def sent(self, next_use: int = 0, count: int = 1) -> list[Held]:
        """A group on its way; it is let go of at once if the limit says so."""
        group = self.group(next_use)
        held = [self.held(group) for _ in range(count)]
        self.engine.send(group)
        return held

    def run(self) -> None:
        self.out.run()
        self.back.run()

    def resident_groups(self) -> int:
        return self.engine.resident // NBYTES

    def close(self) -> None:
        self.run()
        self.backing.close()
        self.arena.close()


@pytest.fixture(autouse=True)
def by_reference_count_alone() -> Iterator[None]:
    """Memory must not wait for the garbage collector, which many trainers switch off."""
    gc.disable()
    yield
    gc.enable()
    graph.clear()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def assert_nothing_left(rig: Rig) -> None:
    rig.run()
    rig.engine.collect()
    assert (rig.engine.resident, rig.engine.alive, rig.arena.used) == (0, 0, 0)


# ------------------------------------------------------------------------------------------------ out


def test_within_the_limit_memory_is_not_let_go(rig: Rig) -> None:
    rig.engine.limit = NBYTES
    (held,) = rig.sent()
    assert held.group.state is State.LEAVING
    assert not held.memory.expired()


def test_over_the_limit_the_oldest_are_let_go(rig: Rig) -> None:
    rig.engine.limit = 2 * NBYTES
    groups = [rig.sent()[0].group for _ in range(4)]
    assert [group.state for group in groups] == [State.AWAY, State.AWAY, State.LEAVING, State.LEAVING]
    assert rig.engine.resident == 2 * NBYTES


def test_what_is_let_go_has_no_memory_in_hbm(rig: Rig) -> None:
    (held,) = rig.sent()
    rig.out.run()
    assert held.memory.expired()
    assert held.saved.alias.untyped_storage().nbytes() == 0


def test_memory_is_let_go_in_the_order_of_the_stream(rig: Rig) -> None:
    (held,) = rig.sent()
    assert held.group.parcel is not None
    assert rig.compute.waits == [(held.group.parcel.filled, 1)]


def test_an_alias_without_memory_still_tells_of_changes_in_place(rig: Rig) -> None:
    x = torch.zeros(NBYTES, dtype=torch.uint8)
    group = rig.group()
    held = Held(rig.engine, group, x)
    rig.engine.send(group)
    x.add_(1)
    assert held.saved.alias._version == held.saved.version + 1


def test_a_tensor_saved_again_after_its_storage_left_holds_no_memory(rig: Rig) -> None:
    x = torch.zeros(NBYTES, dtype=torch.uint8)
    group = rig.group()
    first = Held(rig.engine, group, x)
    rig.engine.send(group)
    again = Held(rig.engine, group, x, first.saved)
    rig.out.run()
    del x
    assert again.memory.expired()
    assert again.use().numel() == NBYTES


def test_a_group_without_members_does_not_leave(rig: Rig) -> None:
    rig.engine.send(rig.group())
    assert rig.out.copies == 0


def test_members_lie_in_slots_the_large_ones_first(rig: Rig) -> None:
    group = rig.group()
    members = [rig.held(group, nbytes) for nbytes in (1, 5 * MiB, 700, 6 * MiB)]
    rig.engine.send(group)
    assert [held.saved.offset for held in members] == [11 * MiB, 0, 11 * MiB + SLOT, 5 * MiB]
    rig.out.run()
    for held in members:
        view = held.use()
        rig.back.run()
        assert torch.equal(view, held.expected)


def test_a_full_tier_leaves_the_group_where_it_is(rig: Rig) -> None:
    small = Rig(dram=PAGE)
    (first,) = small.sent()
    group = small.group()
    second = small.held(group)
    with pytest.raises(TierFull, match="tier dram is full"):
        small.engine.send(group)
    assert torch.equal(second.saved.alias, second.expected)
    first.die()
    small.out.run()
    small.engine.send(group)
    assert group.state is State.AWAY
    small.close()


def test_a_group_waits_for_the_stream_it_was_made_on(rig: Rig) -> None:
    group = rig.group()
    rig.held(group)
    rig.compute.current = 2
    rig.engine.send(group)
    assert rig.out.followed == [1]
    assert [stream for _, stream in rig.compute.waits] == [1]


# ----------------------------------------------------------------------------------------------- back


def test_what_is_needed_on_its_way_out_is_handed_back(rig: Rig) -> None:
    rig.engine.limit = NBYTES
    (held,) = rig.sent()
    assert torch.equal(held.use(), held.expected)
    assert rig.back.copies == 0


def test_what_was_handed_back_stays_whole_when_its_group_is_let_go(rig: Rig) -> None:
    rig.engine.limit = NBYTES
    (held,) = rig.sent()
    given = held.use()
    rig.engine.limit = 0
    rig.sent()
    rig.engine.relieve()
    assert torch.equal(given, held.expected)


def test_a_group_that_cannot_come_back_holds_no_hbm_and_can_later(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise TierFull("dram", None, NBYTES, 0, 0)

    (held,) = rig.sent()
    rig.run()
    with monkeypatch.context() as patch:
        patch.setattr(rig.backing, "lend", full)
        with pytest.raises(TierFull):
            rig.engine.source(held.saved)
    assert held.saved.group.buffer is None
    given = held.use()
    rig.run()
    assert torch.equal(given, held.expected)


def test_a_group_comes_back_bit_for_bit_in_one_copy(rig: Rig) -> None:
    members = rig.sent(count=3)
    rig.out.run()
    views = [held.use() for held in members]
    rig.back.run()
    assert all(torch.equal(view, held.expected) for view, held in zip(views, members, strict=True))
    assert rig.back.copies == 1


def test_a_group_that_comes_back_waits_for_its_own_copy_out(rig: Rig) -> None:
    (held,) = rig.sent()
    held.use()
    _, after, _ = rig.back.jobs[0]
    assert held.group.parcel is not None and held.group.parcel.filled in after


def test_the_stream_waits_for_a_buffer_once(rig: Rig) -> None:
    members = rig.sent(count=3)
    rig.out.run()
    rig.compute.waits.clear()
    for held in members:
        held.use()
    assert len(rig.compute.waits) == 1


def test_every_stream_that_uses_a_buffer_waits_for_it(rig: Rig) -> None:
    one, other, _ = rig.sent(count=3)
    rig.out.run()
    rig.compute.waits.clear()
    one.use()
    rig.compute.current = 2
    other.use()
    assert [stream for _, stream in rig.compute.waits] == [1, 2]
    assert [stream for _, stream in rig.compute.handed_over] == [2]


def test_a_buffer_is_handed_over_to_a_first_user_on_another_stream(rig: Rig) -> None:
    held, _ = rig.sent(count=2)
    rig.out.run()
    rig.engine.limit = 2 * NBYTES
    rig.engine.begin_backward()
    rig.compute.current = 2
    held.use()
    assert [stream for _, stream in rig.compute.handed_over] == [2]


def test_groups_come_back_in_the_order_in_which_they_are_needed(rig: Rig) -> None:
    groups = {next_use: rig.sent(next_use)[0] for next_use in (5, 1, 9, 3)}
    rig.out.run()
    rig.engine.limit = 2 * NBYTES
    rig.engine.begin_backward()
    home = [next_use for next_use, held in groups.items() if held.group.state is State.HOME]
    assert sorted(home) == [1, 3]
    groups[1].use()
    assert groups[5].group.state is State.HOME
    assert groups[9].group.state is State.AWAY


def test_prefetching_stays_within_the_limit(rig: Rig) -> None:
    for next_use in range(6):
        rig.sent(next_use)
    rig.out.run()
    rig.engine.limit = 3 * NBYTES
    rig.engine.begin_backward()
    assert rig.engine.resident == 3 * NBYTES


def test_no_more_groups_come_back_early_than_may(rig: Rig) -> None:
    groups = [rig.sent(next_use=k)[0] for k in range(6)]
    rig.out.run()
    rig.engine.limit = 10 * NBYTES
    rig.engine.ahead = 2
    rig.engine.begin_backward()
    assert [held.group.state for held in groups[:3]] == [State.HOME, State.HOME, State.AWAY]
    groups[0].use()
    assert [held.group.state for held in groups[2:4]] == [State.HOME, State.AWAY]


def test_a_group_that_died_before_its_use_makes_way_for_the_next(rig: Rig) -> None:
    groups = [rig.sent(next_use=k)[0] for k in range(3)]
    rig.out.run()
    rig.engine.limit = 10 * NBYTES
    rig.engine.ahead = 1
    rig.engine.begin_backward()
    groups[0].die()
    rig.back.run()
    rig.engine.collect()
    rig.engine.prefetch()
    assert [held.group.state for held in groups[1:]] == [State.HOME, State.AWAY]


def test_prefetching_waits_for_bytes_that_stay(rig: Rig) -> None:
    rig.sent()
    rig.out.run()
    rig.engine.limit = NBYTES
    rig.engine.entered(1)
    rig.engine.begin_backward()
    assert rig.back.copies == 0
    rig.engine.left(1)
    assert rig.back.copies == 1


def test_a_group_comes_back_when_its_position_is_reached(rig: Rig) -> None:
    (held,) = rig.sent(7)
    rig.out.run()
    held.group.bring_at = 5
    rig.engine.limit = NBYTES
    rig.engine.begin_backward()
    rig.engine.reached(Pace(birth=0, use=4, from_birth=None, from_use=None))
    assert rig.back.copies == 0
    rig.engine.reached(Pace(birth=0, use=5, from_birth=None, from_use=None))
    assert rig.back.copies == 1


def test_what_is_needed_before_its_position_comes_back_all_the_same(rig: Rig) -> None:
    (held,) = rig.sent()
    held.group.bring_at = 100
    rig.out.run()
    view = held.use()
    rig.back.run()
    assert torch.equal(view, held.expected)


def test_the_room_of_a_site_holds_from_its_birth_and_from_its_use(rig: Rig) -> None:
    rig.engine.limit = 4 * NBYTES
    groups = [rig.sent(next_use)[0].group for next_use in range(3)]
    rig.engine.born(Pace(birth=3, use=4, from_birth=NBYTES, from_use=3 * NBYTES))
    assert [group.state for group in groups] == [State.AWAY, State.AWAY, State.LEAVING]
    rig.out.run()
    rig.engine.begin_backward()
    assert rig.back.copies == 0
    rig.engine.reached(Pace(birth=3, use=4, from_birth=NBYTES, from_use=3 * NBYTES))
    assert rig.back.copies == 2


def test_what_is_asked_for_again_does_not_turn_the_room_back(rig: Rig) -> None:
    first, second = (Pace(0, use, None, use * NBYTES) for use in (4, 5))
    for pace in (first, second, first):
        rig.engine.reached(pace)
    assert rig.engine.limit == 5 * NBYTES


def test_what_is_needed_comes_back_whatever_the_limit(rig: Rig) -> None:
    (held,) = rig.sent()
    rig.out.run()
    rig.engine.begin_backward()
    view = held.use()
    rig.back.run()
    assert torch.equal(view, held.expected)


def test_a_buffer_goes_with_the_last_tensor_that_was_asked_for(rig: Rig) -> None:
    one, other = rig.sent(count=2)
    rig.out.run()
    one.use()
    assert one.group.state is State.HOME and one.group.buffer is not None
    buffer = StorageWeakRef(one.group.buffer.untyped_storage())
    view = other.use()
    assert rig.engine.resident == 0
    rig.back.run()
    assert torch.equal(view, other.expected)
    del view
    assert buffer.expired()


def test_no_room_for_a_prefetch_is_no_error(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    (held,) = rig.sent()
    rig.out.run()
    rig.engine.limit = NBYTES

    def refuse(nbytes: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(rig.compute, "empty", refuse)
        rig.engine.begin_backward()
        with pytest.raises(torch.OutOfMemoryError):
            held.use()
    view = held.use()
    rig.back.run()
    assert torch.equal(view, held.expected)


def test_a_second_backward_brings_groups_back_again(rig: Rig) -> None:
    members = rig.sent(count=2)
    rig.out.run()
    for _ in range(3):
        views = [held.use() for held in members]
        rig.back.run()
        assert all(torch.equal(view, held.expected) for view, held in zip(views, members, strict=True))


def test_a_second_backward_does_not_keep_all_groups_in_hbm(rig: Rig) -> None:
    groups = [rig.sent(next_use)[0] for next_use in range(8)]
    rig.out.run()
    for _ in range(3):
        for held in groups:
            held.use()
            rig.back.run()
    assert sum(held.group.buffer is not None for held in groups) <= 1


def test_a_graph_outlives_the_lanes() -> None:
    arena = DramArena(64 * MiB, pinned=False)
    backing = Backing(arena, None, Counters())
    lanes = [HostLane(name, Counters()) for name in ("d2h", "h2d")]
    engine = Engine(HostCompute(Counters()), lanes[0], lanes[1], backing)
    group = Group(0, engine.compute.stream())
    held = Held(engine, group, torch.randint(256, (NBYTES,), dtype=torch.uint8))
    engine.send(group)
    for lane in lanes:
        lane.close()
    backing.close()
    arena.close()
    given: list[torch.Tensor] = []
    backward = threading.Thread(target=lambda: given.append(held.use()), daemon=True)
    backward.start()
    backward.join(5)
    assert given and torch.equal(given[0], held.expected)


# ----------------------------------------------------------------------------------------------- disk


@pytest.fixture
def disk() -> Iterator[Rig]:
    store = HandStore(1 << 30, at_once=True)
    rig = Rig(dram=4 * PAGE, store=store)
    yield rig
    store.finish()
    rig.close()


def test_groups_past_dram_come_back_from_disk(disk: Rig) -> None:
    groups = []
    for next_use in reversed(range(10)):
        groups.append(disk.sent(next_use)[0])
        disk.out.run()
    disk.engine.limit = 2 * NBYTES
    disk.engine.begin_backward()
    for held in reversed(groups):
        view = held.use()
        disk.back.run()
        assert torch.equal(view, held.expected)
        held.die()
    assert_nothing_left(disk)


def test_a_group_goes_to_the_tier_that_the_plan_names(disk: Rig) -> None:
    named = []
    for tier in ("nvme", "dram", None):
        group = disk.group()
        group.tier = tier
        named.append(disk.held(group))
        disk.engine.send(group)
        disk.out.run()
    parcels = [held.group.parcel for held in named]
    assert [parcel is not None and parcel.extent is not None for parcel in parcels] == [True, False, False]
    for _ in range(3):  # DRAM runs short: what is to stay there goes last, though it is needed no sooner
        disk.sent(next_use=-1)
        disk.out.run()
    assert parcels[2] is not None and parcels[2].extent is not None
    assert parcels[1] is not None and parcels[1].extent is None
    for held in named:
        view = held.use()
        disk.back.run()
        assert torch.equal(view, held.expected)


# ----------------------------------------------------------------------------------------------- ends


def filling(rig: Rig) -> Held:
    return rig.held(rig.group())


def leaving(rig: Rig) -> Held:
    rig.engine.limit = NBYTES
    return rig.sent()[0]


def away(rig: Rig) -> Held:
    return rig.sent()[0]


def away_for_good(rig: Rig) -> Held:
    held = away(rig)
    rig.out.run()
    return held


def coming_home(rig: Rig) -> Held:
    held = away_for_good(rig)
    rig.engine.limit = NBYTES
    rig.engine.begin_backward()
    assert held.group.state is State.HOME
    return held


def home_again(rig: Rig) -> Held:
    held = away_for_good(rig)
    for _ in range(2):
        held.use()
        rig.back.run()
    assert held.group.state is State.HOME
    return held


@pytest.mark.parametrize("reach", [filling, leaving, away, away_for_good, coming_home, home_again])
def test_a_group_that_dies_leaves_nothing(rig: Rig, reach: Callable[[Rig], Held]) -> None:
    held = reach(rig)
    held.die()
    assert_nothing_left(rig)
    assert held.group.state is State.GONE
    assert held.memory.expired()
    assert held.group.buffer is None


def test_a_group_that_dies_while_it_fills_gives_its_memory_back(rig: Rig) -> None:
    held = filling(rig)
    held.die()
    rig.engine.collect()
    assert held.memory.expired()


def test_a_group_that_dies_on_its_way_out_makes_nobody_wait(rig: Rig) -> None:
    held = leaving(rig)
    assert held.group.parcel is not None
    filled = held.group.parcel.filled
    held.use()
    held.die()
    rig.engine.collect()
    assert rig.compute.waits == []
    assert rig.compute.outlasted == [(filled, 1)]  # whoever owns the memory is told that the lane still reads it


def test_memory_that_a_lane_still_fills_is_not_reused_before(rig: Rig) -> None:
    held = coming_home(rig)
    assert held.group.parcel is not None
    lent = held.group.parcel.lent
    held.die()
    rig.engine.collect()
    assert lent in [event for event, _ in rig.compute.waits]


def test_a_block_that_a_lane_still_reads_is_guarded(rig: Rig) -> None:
    rig = Rig(dram=PAGE)
    held = coming_home(rig)
    assert held.group.parcel is not None
    lent = held.group.parcel.lent
    held.die()
    rig.sent()
    _, after, _ = rig.out.jobs[-1]
    assert lent in after
    rig.back.run()
    rig.close()


def test_a_group_lives_as_long_as_one_of_its_tensors(rig: Rig) -> None:
    one, other = rig.sent(count=2)
    rig.out.run()
    one.use()
    one.die()
    rig.engine.collect()
    view = other.use()
    rig.back.run()
    assert torch.equal(view, other.expected)
    other.die()
    assert_nothing_left(rig)


def test_what_is_never_used_leaves_with_its_graph(rig: Rig) -> None:
    used, unused = rig.sent(count=2)
    rig.out.run()
    used.use()
    for held in (used, unused):
        held.die()
    assert_nothing_left(rig)


def test_a_failed_copy_keeps_no_block(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("no room to gather in")

    group = rig.group()
    held = rig.held(group)
    with monkeypatch.context() as patch:
        patch.setattr(rig.out, "copy", refuse)
        with pytest.raises(torch.OutOfMemoryError):
            rig.engine.send(group)
    assert rig.arena.used == 0
    assert torch.equal(held.use(), held.expected)


# ------------------------------------------------------------------------------------------- accounting


def test_the_period_counts_what_is_still_alive(rig: Rig) -> None:
    held = filling(rig)
    rig.engine.entered(5)
    rig.engine.end_period()
    assert rig.engine.resident == NBYTES
    held.use()
    assert rig.engine.resident == 0


def test_what_leaves_twice_is_subtracted_once(rig: Rig) -> None:
    held = filling(rig)
    rig.engine.entered(5)
    rig.engine.left(5)
    rig.engine.left(5)
    assert rig.engine.resident == NBYTES
    held.die()
    assert_nothing_left(rig)


def test_the_peak_is_that_of_the_period(rig: Rig) -> None:
    rig.compute.static = 1000
    rig.engine.entered(50)
    rig.engine.begin_backward()
    rig.engine.left(50)
    assert rig.engine.end_period() == 1050
    assert rig.engine.end_period() == 1000


def test_bytes_that_stay_push_groups_out(rig: Rig) -> None:
    rig.engine.limit = 2 * NBYTES
    (held,) = rig.sent()
    rig.engine.entered(NBYTES + 1)
    assert held.group.state is State.AWAY


# -------------------------------------------------------------------------------- any program at all


@dataclass
class Real:
    """Threads for lanes, slow ones, and perhaps a disk."""

    engine: Engine
    backing: Backing
    arena: DramArena
    store: NvmeStore | None
    lanes: list[HostLane]

    def close(self) -> None:
        for lane in self.lanes:
            lane.close()
        self.backing.close()
        self.engine.collect()
        assert (self.engine.resident, self.engine.alive, self.arena.used) == (0, 0, 0)
        if self.store is not None:
            assert self.store.used == 0
            self.store.close()
        self.arena.close()


def real(dram: int, path: Path | None) -> Real:
    counters = Counters()
    arena = DramArena(dram, pinned=False, step=dram)
    store = None if path is None else NvmeStore([path], 256 * MiB, gds="off", stripe=MiB, step=32 * MiB)
    backing = Backing(arena, store, counters)
    lanes = [HostLane(name, counters, bytes_per_second=400 * MiB) for name in ("d2h", "h2d")]
    return Real(Engine(HostCompute(counters), lanes[0], lanes[1], backing), backing, arena, store, lanes)


def forward(engine: Engine, rng: Random, groups: int) -> list[Held]:
    """Saves tensors into groups of all sizes; some are saved twice, some groups stay incomplete."""
    held: list[Held] = []
    for number in range(groups):
        group = Group(-number, engine.compute.stream())
        for _ in range(rng.randrange(1, 5)):
            tensor = torch.randint(256, (rng.randrange(1, 300 * KiB),), dtype=torch.uint8)
            held.append(Held(engine, group, tensor))
            if rng.random() < 0.2:
                held.append(Held(engine, group, tensor, held[-1].saved))
        if rng.random() < 0.9:
            engine.send(group)
            if rng.random() < 0.2:  # saved once more when its group is on its way, or gone
                held.append(Held(engine, group, tensor, held[-1].saved))
        if rng.random() < 0.2:
            engine.entered(rng.randrange(200 * KiB))
    return held


def backward(engine: Engine, rng: Random, held: list[Held]) -> None:
    """Asks for most of it in reverse, some of it out of order, some of it twice; then the graph dies."""
    engine.begin_backward()
    order = held[::-1]
    for _ in range(3):
        if rng.random() < 0.5:
            one, other = (rng.randrange(len(order)) for _ in range(2))
            order[one], order[other] = order[other], order[one]
    again = rng.random() < 0.3
    for step in range(1 + again):
        for tensor in order:
            if rng.random() < 0.9:
                assert torch.equal(tensor.use(), tensor.expected)
                if rng.random() < 0.1:
                    engine.left(rng.randrange(200 * KiB))
            if step == again:
                tensor.die()


@pytest.mark.parametrize("on_disk", [False, True], ids=["dram", "nvme"])
def test_any_program_gets_back_what_it_saved(on_disk: bool, tmp_path: Path, seed: int) -> None:
    rng = Random(seed)
    torch.manual_seed(seed)
    rig = real(8 * PAGE if on_disk else 128 * MiB, tmp_path if on_disk else None)
    kept: list[Held] = []
    for _ in range(12):
        rig.engine.limit = rng.choice([0, 200 * KiB, MiB, 100 * MiB])
        held = forward(rig.engine, rng, rng.randrange(1, 20))
        if rng.random() < 0.2:  # an exception: this graph dies without a backward
            for tensor in held:
                tensor.die()
        elif rng.random() < 0.2:  # two losses: this graph waits for the next period
            kept.extend(held)
        else:
            backward(rig.engine, rng, kept + held)
            kept = []
        rig.engine.end_period()
        assert rig.engine.resident >= 0
    for tensor in kept:
        assert torch.equal(tensor.use(), tensor.expected)
        tensor.die()
    rig.close()
