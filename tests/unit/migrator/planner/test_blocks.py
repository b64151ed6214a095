from __future__ import annotations

from hypothesis import given

from tests.unit.traces import programs
from torch_tiers.migrator.model.trace import Recipe, Site, Trace
from torch_tiers.migrator.planner.blocks import Block, blocks, segments, within
from torch_tiers.migrator.planner.effects import effect


def saved(*keys: str) -> Trace:
    """One storage of 10 bytes for each key, which is made from the one before it; backward asks in reverse."""
    last = 2 * len(keys) - 1
    sites = tuple(Site(key, k, 10, k, (last - k,)) for k, key in enumerate(keys))
    return Trace(sites, last + 1, recipes={k: Recipe("Op", (k - 1,), 1.0) for k in range(1, len(keys))})


def test_what_follows_each_other_in_one_module_is_a_block() -> None:
    trace = saved("net.a:0", "net.a.x:0", "net.b:0", ":0", "net.a:1")
    assert blocks(trace) == [
        Block("net", 0, 3, 30),
        Block("net.a", 0, 2, 20),
        Block("net.a.x", 1, 2, 10),
        Block("net.b", 2, 3, 10),
        Block("net", 4, 5, 10),
        Block("net.a", 4, 5, 10),
    ]


def test_segments_are_the_outermost_blocks_that_are_small_enough() -> None:
    found = blocks(saved("net.a.x:0", "net.a.y:0", "net.b.x:0", "net.b.y:0", "net.b.z:0"))
    assert not list(segments(found, 10)), "one tensor cannot be made from another of its own module"
    assert [block.path for block in segments(found, 20)] == ["net.a"]
    assert [block.path for block in segments(found, 30)] == ["net.a", "net.b"]
    assert [block.path for block in segments(found, 50)] == ["net"]


def test_a_segment_holds_what_it_begins_with_and_is_made_from_that() -> None:
    trace = saved("net.a:0", "net.a:1", "net.b:0", "net.b:1", "net.b:2")
    chosen = [block for block in blocks(trace) if block.path != "net"]
    assert within(trace, chosen) == {1, 3, 4}
    assert within(trace, chosen[:1]) == {1}


def test_what_was_saved_before_a_segment_is_not_the_segment_s() -> None:
    sites = (Site(":0", 0, 10, 0, (3,)), Site("net:0", 0, 10, 1, (2,)))
    trace = Trace(sites, 4, recipes={0: Recipe("Op", (), 1.0)})
    assert not within(trace, blocks(trace))


@given(programs())
def test_what_segments_drop_can_be_made_without_what_other_segments_drop(trace: Trace) -> None:
    found = blocks(trace)
    for bound in {0, *(block.nbytes for block in found)}:
        chosen = list(segments(found, bound))
        dropped = within(trace, chosen)
        effect(trace, dropped)
        for block in chosen:
            own = {site.storage for site in trace.sites[block.first : block.end]} & dropped
            assert all(source in own or source not in dropped for k in own for source in trace.recipes[k].inputs)
