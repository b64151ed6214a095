"""Groups that come back: in order, in time, bit for bit, and never past the limit but for what is needed."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.unit.by_hand import raising
from tests.unit.migrator.offload.rig import NBYTES, Held, Rig, assert_comes_back
from tests.unit.natively import built
from torch_tiers.allocator.errors import TierFull
from torch_tiers.allocator.host.dram import DramArena
from torch_tiers.allocator.sizes import MiB
from torch_tiers.migrator.offload.backing import Backing
from torch_tiers.migrator.offload.engine import Engine
from torch_tiers.migrator.offload.group import Group, State
from torch_tiers.migrator.planner.paces import Pace
from torch_tiers.migrator.streams.host import HostCompute, HostLane
from torch_tiers.migrator.telemetry.counters import Counters


def test_what_is_needed_on_its_way_out_is_handed_back(rig: Rig) -> None:
    rig.engine.hbm.limit = NBYTES
    (held,) = rig.offloaded()
    assert torch.equal(held.use(), held.expected)
    assert rig.back.copies == 0


def test_what_was_handed_back_stays_whole_when_its_group_is_released(rig: Rig) -> None:
    rig.engine.hbm.limit = NBYTES
    (held,) = rig.offloaded()
    given = held.use()
    rig.engine.hbm.limit = 0
    rig.offloaded()
    rig.engine.relieve()
    assert torch.equal(given, held.expected)


def test_a_group_that_cannot_come_back_holds_no_hbm_and_can_later(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    (held,) = rig.offloaded()
    rig.run()
    with monkeypatch.context() as patch:
        patch.setattr(rig.backing, "lend", raising(TierFull, "dram", None, NBYTES, 0, 0))
        with pytest.raises(TierFull):
            rig.engine.source(held.saved)
    assert held.saved.group.buffer is None
    assert_comes_back(rig, held)


def test_a_group_comes_back_bit_for_bit_in_one_copy_that_waits_for_its_own_copy_out(rig: Rig) -> None:
    members = rig.offloaded(count=3)
    views = [held.use() for held in members]
    _, after, _ = rig.back.jobs[0]
    stored = members[0].group.stored
    assert stored is not None and stored.filled in after
    rig.run()
    assert all(torch.equal(view, held.expected) for view, held in zip(views, members, strict=True))
    assert rig.back.copies == 1


def test_a_glimpse_of_a_group_brings_nothing_back(rig: Rig) -> None:
    (held,), (other,) = rig.offloaded(next_use=1), rig.offloaded(next_use=0)
    rig.run()
    before = (rig.engine.hbm.resident, held.saved.group.state, rig.engine.unsettled)
    seen = rig.engine.glimpse(held.saved)
    rig.back.run()
    assert seen is not None
    assert torch.equal(seen[held.saved.offset :][:NBYTES], held.expected)
    assert (rig.engine.hbm.resident, held.saved.group.state, rig.engine.unsettled) == before
    assert held.saved.group.buffer is None
    for late in (other, held):  # as they would have come back without it
        assert_comes_back(rig, late)


def test_a_glimpse_of_what_is_here_is_of_what_is_here(rig: Rig) -> None:
    rig.engine.hbm.limit = 2 * NBYTES
    (held,) = rig.offloaded()
    assert rig.engine.glimpse(held.saved) is None  # the program's own memory is still there
    rig.engine.hbm.limit = 0
    rig.engine.relieve()
    rig.run()
    rig.engine.hbm.limit = NBYTES
    rig.engine.begin_backward()  # which brings it back early
    rig.back.run()
    assert rig.engine.glimpse(held.saved) is held.saved.group.buffer
    assert held.saved.group in rig.engine._prefetcher.early  # and there is no room for another yet
    assert rig.back.copies == 1


def test_every_stream_that_uses_a_buffer_waits_for_it_once(rig: Rig) -> None:
    members = rig.offloaded(count=4)
    rig.out.run()
    rig.compute.waits.clear()
    for held, stream in zip(members, (1, 1, 2, 2), strict=True):
        rig.compute.current = stream
        held.use()
    assert [stream for _, stream in rig.compute.waits] == [1, 2]
    assert [stream for _, stream in rig.compute.handed_over] == [2]


def test_a_buffer_is_handed_over_to_a_first_user_on_another_stream(rig: Rig) -> None:
    held, _ = rig.offloaded(count=2)
    rig.out.run()
    rig.engine.hbm.limit = 2 * NBYTES
    rig.engine.begin_backward()
    rig.compute.current = 2
    held.use()
    assert [stream for _, stream in rig.compute.handed_over] == [2]


def test_groups_come_back_in_the_order_in_which_they_are_needed_and_within_the_limit(rig: Rig) -> None:
    groups = {next_use: rig.offloaded(next_use)[0] for next_use in (5, 1, 9, 3)}
    rig.out.run()
    rig.engine.hbm.limit = 2 * NBYTES
    rig.engine.begin_backward()
    assert rig.engine.hbm.resident == 2 * NBYTES
    home = [next_use for next_use, held in groups.items() if held.group.state is State.HOME]
    assert sorted(home) == [1, 3]
    groups[1].use()
    assert groups[5].group.state is State.HOME
    assert groups[9].group.state is State.AWAY


def test_no_more_groups_come_back_early_than_may(rig: Rig) -> None:
    groups = [rig.offloaded(next_use=k)[0] for k in range(6)]
    rig.out.run()
    rig.engine.hbm.limit = 10 * NBYTES
    rig.engine.ahead = 2
    rig.engine.begin_backward()
    assert [held.group.state for held in groups[:3]] == [State.HOME, State.HOME, State.AWAY]
    groups[0].use()
    assert [held.group.state for held in groups[2:4]] == [State.HOME, State.AWAY]


def test_a_group_that_died_before_its_use_makes_way_for_the_next(rig: Rig) -> None:
    groups = [rig.offloaded(next_use=k)[0] for k in range(3)]
    rig.out.run()
    rig.engine.hbm.limit = 10 * NBYTES
    rig.engine.ahead = 1
    rig.engine.begin_backward()
    groups[0].die()
    rig.back.run()
    rig.engine.collect()
    rig.engine.prefetch()
    assert [held.group.state for held in groups[1:]] == [State.HOME, State.AWAY]


def test_prefetching_waits_for_bytes_that_stay(rig: Rig) -> None:
    rig.offloaded()
    rig.out.run()
    rig.engine.hbm.limit = NBYTES
    rig.engine.enter(1)
    rig.engine.begin_backward()
    assert rig.back.copies == 0
    rig.engine.leave(1)
    assert rig.back.copies == 1


def test_a_group_comes_back_when_its_position_is_reached(rig: Rig) -> None:
    (held,) = rig.offloaded(7)
    rig.out.run()
    held.group.bring_at = 5
    rig.engine.hbm.limit = NBYTES
    rig.engine.begin_backward()
    rig.engine.leave(0, Pace(birth=0, use=4, from_birth=None, from_use=None))
    assert rig.back.copies == 0
    rig.engine.leave(0, Pace(birth=0, use=5, from_birth=None, from_use=None))
    assert rig.back.copies == 1


def _asked(rig: Rig, monkeypatch: pytest.MonkeyPatch, paces: list[Pace]) -> list[bool]:
    """Backward asks for a site after the other; for each, whether the engine looked for what may come back."""
    looks: list[None] = []
    prefetch = rig.engine.prefetch
    monkeypatch.setattr(rig.engine, "prefetch", lambda: (looks.append(None), prefetch())[1])
    found = []
    for pace in paces:
        before = len(looks)
        rig.engine.leave(0, pace)
        found.append(len(looks) > before)
    return found


def test_no_look_is_taken_where_the_next_group_cannot_come(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    (first,), (second,) = rig.offloaded(next_use=1), rig.offloaded(next_use=2)
    first.group.bring_at, second.group.bring_at = 5, 6
    rig.out.run()
    rig.engine.begin_backward()
    room = {4: 9, 5: 0, 6: 1, 7: 1, 8: 2, 9: 9}  # in groups, by the position of a site
    paces = [Pace(0, use, None, groups * NBYTES) for use, groups in room.items()]
    assert _asked(rig, monkeypatch, paces) == [False, False, True, False, True, False]
    assert rig.back.copies == 2


def test_a_look_is_taken_once_the_group_that_was_next_has_died(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    (first,), (second,) = rig.offloaded(next_use=1), rig.offloaded(next_use=2)
    first.group.bring_at = 100
    rig.engine.hbm.limit = NBYTES
    rig.out.run()
    rig.engine.begin_backward()
    first.die()
    rig.engine.collect()
    assert _asked(rig, monkeypatch, [Pace(0, 4, None, None)]) == [True]
    assert second.group.state is State.HOME


@pytest.mark.parametrize("limit, bring_at", [(0, -1), (NBYTES, 100)], ids=["beyond_the_limit", "before_its_position"])
def test_what_is_needed_comes_back_all_the_same(rig: Rig, limit: int, bring_at: int) -> None:
    (held,) = rig.offloaded()
    held.group.bring_at = bring_at
    rig.out.run()
    rig.engine.hbm.limit = limit
    rig.engine.begin_backward()
    assert rig.back.copies == 0
    assert_comes_back(rig, held)


def test_the_room_of_a_site_holds_from_its_birth_and_from_its_use(rig: Rig) -> None:
    rig.engine.hbm.limit = 4 * NBYTES
    groups = [rig.offloaded(next_use)[0].group for next_use in range(3)]
    rig.engine.enter(0, Pace(birth=3, use=4, from_birth=NBYTES, from_use=3 * NBYTES))
    assert [group.state for group in groups] == [State.AWAY, State.AWAY, State.LEAVING]
    rig.out.run()
    rig.engine.begin_backward()
    assert rig.back.copies == 0
    rig.engine.leave(0, Pace(birth=3, use=4, from_birth=NBYTES, from_use=3 * NBYTES))
    assert rig.back.copies == 2


def test_what_is_asked_for_again_does_not_turn_the_room_back(rig: Rig) -> None:
    first, second = (Pace(0, use, None, use * NBYTES) for use in (4, 5))
    for pace in (first, second, first):
        rig.engine.leave(0, pace)
    assert rig.engine.hbm.limit == 5 * NBYTES


def test_a_buffer_goes_with_the_last_tensor_that_was_asked_for(rig: Rig) -> None:
    one, other = rig.offloaded(count=2)
    rig.out.run()
    one.use()
    assert one.group.state is State.HOME and one.group.buffer is not None
    buffer = StorageWeakRef(one.group.buffer.untyped_storage())
    view = other.use()
    assert rig.engine.hbm.resident == 0
    rig.back.run()
    assert torch.equal(view, other.expected)
    del view
    assert buffer.expired()


def test_no_room_for_a_prefetch_is_no_error(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    (held,) = rig.offloaded()
    rig.out.run()
    rig.engine.hbm.limit = NBYTES
    with monkeypatch.context() as patch:
        patch.setattr(rig.compute, "empty", raising(torch.OutOfMemoryError, "no room"))
        rig.engine.begin_backward()
        with pytest.raises(torch.OutOfMemoryError):
            held.use()
    assert_comes_back(rig, held)


def test_a_second_backward_brings_groups_back_again_and_does_not_keep_all_in_hbm(rig: Rig) -> None:
    groups = [rig.offloaded(next_use, count=2) for next_use in range(8)]
    rig.out.run()
    for _ in range(3):
        for members in groups:
            for held in members:
                assert_comes_back(rig, held)
    assert sum(held.group.buffer is not None for held, _ in groups) <= 1


def test_a_graph_outlives_the_lanes() -> None:
    arena = DramArena(64 * MiB, pinned=False)
    backing = Backing(arena, None, Counters())
    lanes = [HostLane(name, Counters()) for name in ("d2h", "h2d")]
    engine = Engine(HostCompute(Counters()), lanes[0], lanes[1], backing, built())
    group = Group(0, engine.compute.stream())
    held = Held(engine, group, torch.randint(256, (NBYTES,), dtype=torch.uint8))
    engine.offload(group)
    for lane in lanes:
        lane.close()
    backing.close()
    arena.close()
    given: list[torch.Tensor] = []
    backward = threading.Thread(target=lambda: given.append(held.use()), daemon=True)
    backward.start()
    backward.join(5)
    assert given and torch.equal(given[0], held.expected)
