from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.migrator.policies.worked import LINKS, worked
from tests.unit.modelled import gpt
from torch_tiers.allocator.sizes import GiB, MiB
from torch_tiers.migrator.model.links import PCIE_GEN5
from torch_tiers.migrator.planner.spread import spread
from torch_tiers.migrator.policies import POLICIES
from torch_tiers.migrator.simulator import simulate

TRACE = worked([4] * 4, forward=1.0, backward=20.0)
DIRECT = replace(LINKS, gds_write=MiB / 2, gds_read=MiB / 2)
ALL = {0, 1, 2, 3}


def test_what_would_wait_for_the_lane_to_dram_goes_to_the_drive() -> None:
    """4 s to DRAM, 8 s to the drive; saved at 1, 2, 3 and 4 s::

    a   to DRAM from 1 to 5                             1 to 9 on the drive
    b           from 5 to 9                             2 to 10
    c           from 9 to 13    later than              3 to 11     there
    d           from 9 to 13                            11 to 19
    """
    assert spread(TRACE, ALL, DIRECT) == {2: "nvme"}


def test_what_the_drive_would_be_late_with_does_not_go_there() -> None:
    """c is needed at 9 s, when it would still be written."""
    assert spread(worked([4] * 4, forward=1.0, backward=5.0), ALL, DIRECT) == {}


def test_the_drive_gets_no_more_than_it_holds() -> None:
    assert spread(TRACE, ALL, replace(DIRECT, below=103 * MiB, dram=100 * MiB)) == {}
    assert spread(TRACE, ALL, replace(DIRECT, below=104 * MiB, dram=100 * MiB)) == {2: "nvme"}


def test_without_a_direct_way_nothing_is_given_to_the_drive() -> None:
    assert spread(TRACE, ALL, replace(LINKS, disk_write=MiB, disk_read=MiB)) == {}


@pytest.mark.parametrize("left", [{}, {"d2h": 0.3, "h2d": 0.3, "bus": 0.3}])
def test_auto_has_the_drive_take_what_a_full_lane_would_not(left: dict[str, float]) -> None:
    trace = gpt()
    links = replace(PCIE_GEN5, gds_write=6e9, gds_read=11e9).reduced(left)
    budget = 18 * GiB
    plan = POLICIES["auto"](trace, budget, links)
    result = simulate(trace, links, plan)
    staged = simulate(trace, links.staged, POLICIES["auto"](trace, budget, links.staged))
    assert result.busy["gds_write"] > 0
    assert result.peak["hbm"] <= budget
    assert result.seconds < staged.seconds
