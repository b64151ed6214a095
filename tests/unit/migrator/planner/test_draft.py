from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.traces import chain, programs
from torch_tiers.allocator.sizes import GiB, MiB
from torch_tiers.migrator.model.links import PCIE_GEN5
from torch_tiers.migrator.model.trace import Recipe, Trace
from torch_tiers.migrator.planner.draft import Draft, timed
from torch_tiers.migrator.planner.effects import effect
from torch_tiers.migrator.planner.schedule import occupied

BUDGET = 1 << 60


@given(programs(), st.randoms())
def test_what_is_recomputed_takes_the_memory_that_its_effect_says(trace: Trace, rng: Random) -> None:
    draft = Draft(trace, BUDGET, PCIE_GEN5)
    chosen = [ident for ident in draft.idle if draft.recomputable(ident)]
    for ident in rng.sample(chosen, rng.randint(0, len(chosen))):
        draft.recompute(ident)
    outcome = effect(trace, draft.remade)
    expected = occupied(outcome.held.values(), trace.positions) + outcome.again
    assert draft.memory.used.tolist() == expected.tolist()


@given(programs(), st.randoms())
def test_what_moves_is_back_for_what_is_made_from_it(trace: Trace, rng: Random) -> None:
    draft = Draft(trace, BUDGET, PCIE_GEN5)
    for ident in rng.sample([*draft.idle], len(draft.idle)):
        if draft.recomputable(ident) and rng.random() < 0.5:
            draft.recompute(ident)
        else:
            idle = draft.idle[ident]
            draft.offload(idle, idle.begin + 2, idle.end)
    outcome = effect(trace, draft.remade)
    for ident, trip in draft.trips.items():
        assert trip.bring_at is not None
        assert trip.bring_at <= max(outcome.held[ident].asked[0], draft.idle[ident].begin + 1)


def test_a_window_is_out_early_and_back_late() -> None:
    trace = timed(chain([GiB] * 8), PCIE_GEN5)
    draft = Draft(trace, BUDGET, PCIE_GEN5)
    window = draft.window(draft.idle[0])
    assert window is not None
    assert (window.out.start, window.back.end) == (trace.times[0], trace.times[15])
    draft.move(window)
    assert draft.away(0) == (window.first, window.end)
    again = draft.window(draft.idle[1])
    assert again is not None and again.out.start >= window.out.left


def test_a_trace_without_times_takes_as_long_as_moving_everything() -> None:
    trace = timed(chain([GiB] * 4), PCIE_GEN5)
    assert trace.seconds == 4 * GiB * (1 / PCIE_GEN5.d2h + 1 / PCIE_GEN5.h2d)
    assert len(trace.times) == trace.positions


def test_what_is_recomputed_through_several_ways_counts_each_source_once() -> None:
    """Forty in a row, each made of the two before it, took 44 seconds: every way through them was gone."""
    trace = timed(chain([MiB] * 42), PCIE_GEN5)
    recipes = {k: Recipe("made", (k - 1, k - 2), 1.0) for k in range(2, 42)}
    draft = Draft(replace(trace, recipes=recipes), 10 * MiB, PCIE_GEN5)
    for storage in recipes:
        draft.recompute(storage)
    assert draft.chain(41) == 40.0
