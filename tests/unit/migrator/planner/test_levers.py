"""What a state of the search holds by its own count is what its effect says, where nothing moves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torch_tiers.allocator.sizes import GiB
from torch_tiers.migrator.model.links import PCIE_GEN5
from torch_tiers.migrator.model.trace import Recipe, Site, Trace
from torch_tiers.migrator.planner.effects import effect
from torch_tiers.migrator.planner.levers import DROP, Levers
from torch_tiers.migrator.planner.schedule import occupied

# x -> y, and z: saved at 0 to 2, used at 9 to 7.
SITES = tuple(Site(f"{name}:0", k, 10 + k, k, (9 - k,)) for k, name in enumerate("xyz"))
TRACE = Trace(SITES, 10, times=tuple(range(10)), seconds=10.0, recipes={1: Recipe("Y", (0,), 0.5)})


@pytest.mark.parametrize("held", [{}, {1: 6}, {1: 10}])
def test_what_is_dropped_lies_in_hbm_while_the_program_holds_it(held: dict[int, int]) -> None:
    trace = replace(TRACE, held=held)
    levers = Levers(trace, GiB, PCIE_GEN5)
    state = levers.start()
    assert levers.drop(state, 1)
    outcome = effect(trace, {1})
    expected = occupied(outcome.held.values(), trace.positions) + outcome.again
    assert levers.used(state).tolist() == expected.tolist()


def test_what_one_operator_returned_costs_next_to_nothing_beside_the_rest_of_it() -> None:
    recipes = {1: Recipe("Dropout", (0,), 0.5, call=1), 2: Recipe("Dropout", (0,), 0.5, call=1)}
    levers = Levers(replace(TRACE, recipes=recipes), GiB, PCIE_GEN5)
    state = levers.start()
    assert levers.drop_costs(state)[1:].tolist() == [0.5, 0.5]
    assert levers.drop(state, 1)
    assert levers.drop_costs(state)[2] < 1e-3
    state.action[2] = DROP
    assert levers.drop_shares(state)[1:].tolist() == pytest.approx([0.25, 0.25], abs=1e-3)
