from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.quick import quickest
from tests.unit.traces import chain, programs, traces
from torch_tiers.allocator.sizes import MiB
from torch_tiers.migrator.model.trace import Recipe, Site, Trace
from torch_tiers.migrator.planner.effects import Unobtainable, Work, effect, obtainable
from torch_tiers.migrator.planner.intervals import occupancy
from torch_tiers.migrator.planner.schedule import occupied

# x -> y -> z, and w: saved at 0 to 3, used at 7 to 4; y is made from x, and z from y.
SITES = tuple(Site(f"{name}:0", k, 10 + k, k, (7 - k,)) for k, name in enumerate("xyzw"))
RECIPES = {1: Recipe("Y", (0,), 0.5), 2: Recipe("Z", (1,), 0.25)}
TRACE = Trace(SITES, 8, recipes=RECIPES)


@given(traces())
def test_where_nothing_is_dropped_everything_is_held(trace: Trace) -> None:
    outcome = effect(trace)
    assert (outcome.recomputed, outcome.work, outcome.again.any()) == ((), {}, False)
    assert occupied((held for held in outcome.held.values()), trace.positions).tolist() == occupancy(trace).tolist()


def test_what_is_dropped_is_made_at_its_first_use_and_stays_until_its_last() -> None:
    outcome = effect(TRACE, {2})
    assert outcome.recomputed == ("z:0",)
    assert outcome.work == {5: Work(0.25, (1,))}
    assert outcome.again.tolist() == [0, 0, 0, 12, 0, 0, 12, 0, 0]
    assert outcome.held[1].asked == [5, 6]


def test_what_is_made_from_something_dropped_makes_that_first() -> None:
    """At 5, z needs y, which needs x; y then stays for its own use at 6."""
    outcome = effect(TRACE, {1, 2})
    assert outcome.work == {5: Work(0.75, (0,))}
    assert outcome.again.tolist() == [0, 0, 11, 12, 0, 0, 11 + 12, 11, 0]
    assert min(outcome.held[0].asked) == 5


@pytest.mark.parametrize("dropped", [{0}, {3}])
def test_what_has_no_recipe_cannot_be_dropped(dropped: set[int]) -> None:
    with pytest.raises(Unobtainable, match="no recipe"):
        effect(TRACE, dropped)


def test_two_storages_cannot_be_made_from_each_other_so_that_one_is_held() -> None:
    trace = Trace(SITES, 8, recipes={0: Recipe("X", (1,), 1.0), 1: Recipe("Y", (0,), 1.0)})
    with pytest.raises(Unobtainable, match="from itself"):
        effect(trace, {0, 1})
    assert obtainable(trace, {0, 1}) == {1}


@given(programs(), st.randoms())
def test_every_site_is_held_or_recomputed(trace: Trace, rng: Random) -> None:
    outcome = effect(trace, obtainable(trace, {ident for ident in trace.recipes if rng.random() < 0.5}))
    held = {holder.key for entry in outcome.held.values() for holder in entry.holders}
    assert {site.key for site in trace.sites} == held | set(outcome.recomputed)
    assert held.isdisjoint(outcome.recomputed)


def test_bytes_are_recomputed_for_as_long_as_they_are_read() -> None:
    """A use of x after its holder's: y is made from x at 3, when x itself was used at 2."""
    sites = (Site("x:0", 0, 10, 0, (2,)), Site("y:0", 1, 20, 1, (3,)))
    outcome = effect(Trace(sites, 4, recipes={1: Recipe("Y", (0,), 1.0)}), {1})
    assert outcome.again.tolist() == [0, 0, 20, 0, 10 + 20]
    assert occupied(outcome.held.values(), 4).tolist() == [0, 10, 10, 10, 0]


@pytest.mark.parametrize(("until", "after"), [(5, 0), (8, 12)], ids=["for a while", "until it is made again"])
def test_what_the_program_holds_lies_in_hbm_once_though_nobody_keeps_it(until: int, after: int) -> None:
    """Such as a block's input until it is added: for want of those a plan exceeded its budget by a tensor or two."""
    outcome = effect(replace(TRACE, held={2: until}), {2})
    assert outcome.again.tolist() == [0, 0, 0, 12, 12, after, 12, 0, 0]


def test_scratch_is_there_only_while_something_is_made() -> None:
    """At 5 both y and z are made, one after the other: the larger scratch counts."""
    recipes = {1: Recipe("Y", (0,), 0.5, scratch=100), 2: Recipe("Z", (1,), 0.25, scratch=70)}
    outcome = effect(Trace(SITES, 8, recipes=recipes), {1, 2})
    assert outcome.again.tolist() == [0, 0, 11, 12, 0, 0, 11 + 12 + 100, 11, 0]


def test_scratch_is_gone_before_the_program_asks_for_more() -> None:
    """Of what the program has in use in a stretch, that which it had not in the one before comes later."""
    recipes = {2: Recipe("Z", (1,), 0.25, scratch=100)}
    outcome = effect(Trace(SITES, 8, recipes=recipes, others=(0, 0, 0, 0, 0, 5, 65, 0, 0)), {2})
    assert outcome.again.tolist() == [0, 0, 0, 12, 0, 0, 12 + 100 - 60, 0, 0]


@given(programs(), st.randoms())
def test_what_is_obtainable_can_be_dropped(trace: Trace, rng: Random) -> None:
    asked = {ident for ident in (*trace.recipes, 99) if rng.random() < 0.7}
    dropped = obtainable(trace, asked)
    assert dropped <= asked
    effect(trace, dropped)


def test_what_is_obtainable_of_a_long_chain_is_known_at_once() -> None:
    """By rounds, each of which went through all of them, 4,000 storages took a plan five minutes."""
    trace = replace(chain([MiB] * 10_000), recipes={k: Recipe("Op", (k - 1,), 1e-4) for k in range(1, 10_000)})
    assert quickest(lambda: obtainable(trace, trace.recipes), within=1) < 1
    assert obtainable(trace, trace.recipes) == frozenset(trace.recipes)


def test_a_chain_of_recipes_may_be_as_long_as_a_program_makes_it() -> None:
    """Beyond a thousand it was a RecursionError in the training loop."""
    count = 3000
    recipes = {k: Recipe("sin", (k - 1,), 1e-5) for k in range(1, count)}
    made = effect(replace(chain([MiB] * count), recipes=recipes), range(1, count))
    assert set(made.work) == {count}
    assert made.work[count].seconds == pytest.approx(1e-5 * (count - 1))


def test_what_one_operator_returned_is_made_at_once_and_paid_once() -> None:
    """y and z of one call: z is asked for first, at 5, and y is there from then on."""
    recipes = {1: Recipe("Dropout", (0,), 0.5, host=1e-3, call=1), 2: Recipe("Dropout", (0,), 0.5, host=1e-3, call=1)}
    outcome = effect(Trace(SITES, 8, recipes=recipes), {1, 2})
    assert outcome.work == {5: Work(0.5, (0,), 1e-3)}
    assert outcome.again.tolist() == [0, 0, 11, 12, 0, 0, 11 + 12, 11, 0]
