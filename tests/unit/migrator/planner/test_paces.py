"""What a plan says of time: exactly where groups wait for room, and roughly where none does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from torch_tiers.allocator.sizes import MiB
from torch_tiers.migrator.model.plan import Keep, PageGroup, Plan
from torch_tiers.migrator.model.trace import Site, Trace
from torch_tiers.migrator.planner.paces import COARSE, paces

ROOM = 64 * MiB


def trace(sites: int) -> Trace:
    """Sites that are saved one after the other, and asked for in the opposite order."""
    return Trace(tuple(Site(f"layer{k}:0", k, MiB, k, (2 * sites - 1 - k,)) for k in range(sites)), positions=2 * sites)


def plan(limits: Sequence[tuple[int, int]]) -> Plan:
    kept = {f"layer{k}:0": Keep(MiB, MiB) for k in range(len(limits))}
    return Plan("auto", ROOM, kept, (), limits={f"layer{k}:0": limit for k, limit in enumerate(limits)})


rooms = st.lists(st.tuples(st.integers(0, ROOM), st.integers(0, ROOM)), min_size=1, max_size=40)
close = st.lists(
    st.tuples(st.integers(ROOM // 2, ROOM // 2 + MiB // 2), st.integers(ROOM // 2, ROOM // 2 + MiB // 2)), min_size=2
)


@given(rooms | close)
def test_where_nothing_moves_the_room_is_never_more_than_the_plan_s_and_little_less(
    limits: list[tuple[int, int]],
) -> None:
    told, room = paces(plan(limits), trace(len(limits))), ROOM
    for position in range(2 * len(limits)):
        backward = position >= len(limits)
        site = 2 * len(limits) - 1 - position if backward else position
        pace, exact = told.get(f"layer{site}:0"), limits[site][backward]
        if pace is not None and pace[2 + backward] is not None:
            assert pace[backward] == position
            room = pace[2 + backward] or 0
        assert exact - ROOM // COARSE <= room <= exact


@given(close)
def test_where_nothing_moves_few_sites_have_anything_to_tell(limits: list[tuple[int, int]]) -> None:
    assert len(paces(plan(limits), trace(len(limits)))) == 1


def test_where_groups_wait_for_room_every_site_tells_of_it() -> None:
    limits = [(3 * MiB, 2 * MiB), (4 * MiB, MiB), (5 * MiB, MiB)]
    moving = replace(plan(limits), groups=(PageGroup(("layer2:0",), MiB, 2, 3, bring_at=3),))
    assert {key: tuple(pace) for key, pace in paces(moving, trace(3)).items()} == {
        "layer0:0": (0, 5, 3 * MiB, 2 * MiB),
        "layer1:0": (1, 4, 4 * MiB, MiB),
        "layer2:0": (2, 3, 5 * MiB, MiB),
    }


def test_a_plan_whose_room_never_changes_tells_nothing() -> None:
    assert paces(Plan("auto", ROOM, {}, ()), trace(3)) == {}
