"""The host issues, the device computes, and each waits for the other where it must."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torch_tiers.migrator.model.clocks import QUEUE, Clocks, wall
from torch_tiers.migrator.model.links import Calls, Costs, Links
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.trace import Recipe, Site, Trace
from torch_tiers.migrator.planner.build import make_plan
from torch_tiers.migrator.simulator import Simulated, simulate

FREE = Links(d2h=10.0, h2d=10.0, both=20.0, latency=0.0, costs=Costs(0.0, 0.0), calls=Calls(0.0, 0.0, 0.0))


def chain(clocks: Clocks) -> Trace:
    """Two tensors of 10 bytes that are saved and used in turn, of which the second can be made from the first."""
    sites = (Site("a:0", 0, 10, 0, (3,)), Site("b:0", 1, 10, 1, (2,)))
    recipes = {1: Recipe("op", (0,), seconds=2.0, host=3.0)}
    return Trace(sites, 4, others=(0,) * 5, recipes=recipes).on(clocks)


def played(trace: Trace, *away: int, drop: int | None = None, links: Links = FREE) -> Simulated:
    plan: Plan = make_plan("test", trace, set(away), 1000, dropped=() if drop is None else (drop,))
    return simulate(trace, links, plan)


def even(device: float, host: float, **more: frozenset[int]) -> Clocks:
    return Clocks((device,) * 5, (host,) * 5, **more)


def test_who_is_slower_device_or_host_has_the_step_to_itself() -> None:
    assert wall(even(2.0, 1.0))[0] == wall(even(1.0, 2.0))[0] == [2.0, 4.0, 6.0, 8.0, 10.0]


def test_a_host_that_is_slow_for_a_while_is_hidden_by_the_queue_of_the_device() -> None:
    assert wall(Clocks((4.0, 1.0, 1.0), (1.0, 3.0, 1.0)))[0] == [4.0, 5.0, 6.0]


def test_a_host_that_joins_the_device_begins_with_an_empty_queue() -> None:
    joined = Clocks((4.0, 1.0, 1.0), (1.0, 3.0, 1.0), joins=frozenset({0}))
    assert wall(joined)[0] == pytest.approx([4.0, 7.0, 8.0])


def test_a_host_is_ahead_by_no_more_than_a_queue_as_the_next_iteration_begins() -> None:
    assert wall(even(2.0, 1.0))[1] == QUEUE
    assert wall(even(2.0, 1.0, joins=frozenset({4})))[1] == 0.0
    assert wall(even(1.0, 2.0))[1] == 0.0


def test_the_simulator_gives_a_plan_that_keeps_everything_the_ideal() -> None:
    for clocks in (even(2.0, 1.0), even(1.0, 2.0), even(1.0, 1.0, joins=frozenset({1, 4}))):
        result = played(chain(clocks))
        assert (result.seconds, result.fraction) == (pytest.approx(result.ideal), pytest.approx(1.0))


def test_recomputing_costs_kernels_where_the_device_is_behind_and_launches_where_it_waits_for_the_host() -> None:
    assert played(chain(even(10.0, 1.0)), drop=1).seconds == pytest.approx(50.0 + 2.0)
    assert played(chain(even(1.0, 10.0)), drop=1).seconds == pytest.approx(50.0 + 3.0)


def test_calls_for_moves_cost_nothing_where_the_host_is_ahead() -> None:
    calls = replace(FREE, d2h=1e9, h2d=1e9, both=2e9, calls=Calls(0.5, 0.0, 0.0))
    assert played(chain(even(10.0, 1.0)), 0, links=calls).seconds == pytest.approx(50.0)
    assert played(chain(even(1.0, 10.0)), 0, links=calls).seconds == pytest.approx(50.0 + 0.5)
