from __future__ import annotations

from dataclasses import replace
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.traces import chain, traces
from torch_tiers.allocator.sizes import GiB, MiB
from torch_tiers.migrator.model.links import PCIE_GEN5
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.planner.sizes import look_ahead
from torch_tiers.migrator.policies import flashneuron as policy
from torch_tiers.migrator.simulator import simulate

ROOMS = st.integers(0, 2 * GiB)
TRACE = chain([n * MiB for n in (4, 4, 1, 1, 6, 4, 4, 8, 16)])
flashneuron = partial(policy.plan, links=PCIE_GEN5)


def test_flashneuron_by_hand() -> None:
    """FAST'21, phase 1: select in creation order until what is not selected fits.

    Nine storages, 48 MiB, into 40 MiB of room; a group is 40/16 = 2.5 MiB. The room must also hold two of
    the largest groups as soon as anything moves::

        moved     stays  largest group  stays + 2 groups
        -           48       -            48   > 40
        a  4        44       4            52   > 40
        b  4        40       4            48   > 40
        c  1        39       4            47   > 40
        d  1        38       4            46   > 40
        e  6        32       6            44   > 40
        f  4        28       6            40  <= 40, enough

    Backward asks for f first. Only c and d are small enough to share a group.
    """
    plan = flashneuron(TRACE, 40 * MiB)
    assert [group.sites for group in plan.groups] == [
        ("layer5:0",), ("layer4:0",), ("layer3:0", "layer2:0"), ("layer1:0",), ("layer0:0",),
    ]  # fmt: skip
    assert sorted(plan.keep) == ["layer6:0", "layer7:0", "layer8:0"]
    assert (plan.moved_bytes, plan.kept_bytes, plan.room) == (20 * MiB, 28 * MiB, 40 * MiB)


def test_flashneuron_moves_nothing_that_fits() -> None:
    assert flashneuron(chain([MiB] * 40), 40 * MiB).groups == ()


@given(traces(), ROOMS)
def test_flashneuron_keeps_within_the_room_or_moves_everything(trace: Trace, room: int) -> None:
    plan = flashneuron(trace, room)
    ahead = look_ahead(max((group.nbytes for group in plan.groups), default=0), room)
    assert plan.kept_bytes + ahead <= room or plan.kept_bytes == 0


@given(traces(), ROOMS)
def test_flashneuron_moves_the_oldest(trace: Trace, room: int) -> None:
    stays = set(flashneuron(trace, room).keep)
    moves = [
        not any(site.key in stays for site in trace.sites if site.storage == life.ident) for life in trace.lifetimes
    ]
    assert moves == sorted(moves, reverse=True)


def test_flashneuron_goes_to_the_drive_past_dram() -> None:
    """As in the paper. Where there is no such way groups go where there is room."""
    direct = replace(PCIE_GEN5, disk_write=2.9e9, disk_read=2.9e9, gds_write=3e9, gds_read=6e9)
    plan = policy.plan(TRACE, 40 * MiB, direct)
    assert {group.tier for group in plan.groups} == {"nvme"}
    result = simulate(TRACE, direct, plan)
    assert (result.peak["dram"], result.busy["d2h"], result.busy["h2d"], result.busy["disk_write"]) == (0, 0, 0, 0)
    assert result.peak["nvme"] == plan.stored_bytes
    staged = policy.plan(TRACE, 40 * MiB, direct.staged)
    assert staged.to_json() == flashneuron(TRACE, 40 * MiB).to_json()
    assert {group.tier for group in staged.groups} == {None}
    assert [group.sites for group in staged.groups] == [group.sites for group in plan.groups]


def test_what_else_lies_in_hbm_comes_off_the_budget() -> None:
    crowded = replace(TRACE, others=(*[0] * 17, 90 * MiB, 10 * MiB))
    assert flashneuron(crowded, 130 * MiB).keep == flashneuron(TRACE, 40 * MiB).keep
