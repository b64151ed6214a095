from __future__ import annotations

from dataclasses import replace

import pytest

from torch_tiers.allocator.sizes import GiB
from torch_tiers.migrator.model.links import PCIE_GEN5, Links
from torch_tiers.migrator.model.plan import PageGroup, Plan
from torch_tiers.migrator.planner.low_traffic import LOW_TRAFFIC, crossing, is_low_traffic

PLAN = Plan("", 0, {}, tuple(PageGroup((f"{k}:0",), GiB, 0, 10 - k) for k in range(3)))


def just_low(links: Links) -> float:
    """Seconds of a step of which the plan is just low enough in traffic."""
    seconds = next(k / 100 for k in range(1, 1000) if is_low_traffic(PLAN, links, k / 100))
    assert not is_low_traffic(PLAN, links, seconds - 0.01)
    return seconds


def test_what_moves_crosses_the_bus_there_and_back_and_again_where_it_goes_on_to_drives() -> None:
    assert crossing(PLAN, PCIE_GEN5) == 6 * GiB
    assert crossing(PLAN, replace(PCIE_GEN5, dram=GiB)) == 10 * GiB


def test_what_drives_take_from_hbm_does_not_cross_it() -> None:
    plan = replace(PLAN, groups=(replace(PLAN.groups[0], tier="nvme"), *PLAN.groups[1:]))
    assert crossing(plan, replace(PCIE_GEN5, gds_write=3e9, gds_read=3e9)) == 4 * GiB
    assert crossing(plan, PCIE_GEN5) == 6 * GiB, "there is no such way"


def test_low_traffic_is_a_part_of_what_both_lanes_give_a_second() -> None:
    assert just_low(PCIE_GEN5) == pytest.approx(6 * GiB / (LOW_TRAFFIC * PCIE_GEN5.both), abs=0.01)


def test_what_others_leave_of_the_lanes_makes_nobody_louder() -> None:
    beside_others = PCIE_GEN5.reduced({"d2h": 0.5, "h2d": 0.5, "bus": 0.5})
    assert just_low(beside_others) == just_low(PCIE_GEN5)


def test_lanes_that_were_found_to_be_slow_give_that_little() -> None:
    slow = PCIE_GEN5.scaled({"d2h": 0.1, "h2d": 0.1})
    assert just_low(slow) == pytest.approx(6 * GiB / (LOW_TRAFFIC * (slow.d2h + slow.h2d)), abs=0.01)
