from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.migrator.policies.worked import LINKS, moves, worked
from torch_tiers.allocator.sizes import MiB
from torch_tiers.migrator.policies import POLICIES

TRACE = worked([4] * 6, forward=4.0, backward=8.0)
"""Saved at 4, 8, 12, 16, 20 and 24 s, used at 64 (a), 56, 48, 40, 32 and 24 s (f); 4 s each way."""


def test_g10_by_hand() -> None:
    """MICRO'23: a budget of 21 MiB: 0.99 of it, less two groups of 2 MiB, is 16.79.

    Over that are 3.21 MiB from 20 to 24 s, 7.21 to 32 s and 3.21 to 40 s. Every period is longer than
    ``safe = (4 + 4) * 1.25`` s. Away over all of this are a (8 to 60 s), b (12 to 52) and c (16 to 44): benefit
    ``4 * (4 + 8 + 8)`` each, and a has the longest period. With a away 3.21 MiB are left over from 24 to 32 s: b. Then
    it fits.

    Eager prefetching: with both away 16 MiB lie in HBM from 24 to 32 s and 12 to 40 s, so b, needed first, may
    come at 32 s (position 7), and a, with 12 MiB there from 40 s on, at 40 s (position 8).
    """
    plan = POLICIES["g10"](TRACE, 21 * MiB, LINKS)
    assert moves(plan) == {"b": 7, "a": 8}
    assert {group.tier for group in plan.groups} == {"dram"}


def test_g10_takes_the_larger_benefit_whatever_it_costs() -> None:
    """b has 8 MiB: benefit 8 * 20 s against a's and c's 4 * 20 (see TeraIO's test, which takes a and c).

    Here 0.27 MiB more are over (0.99 of the budget), which b takes as well.
    """
    trace = worked([4, 8, 4, 4, 4, 4], forward=4.0, backward=8.0)
    assert moves(POLICIES["g10"](trace, 27 * MiB, LINKS)).keys() == {"b"}


@pytest.mark.parametrize("lane", ["disk", "gds"])
def test_g10_prefers_the_drive_while_it_is_not_writing(lane: str) -> None:
    """The drive takes 16 s each way: ``safe = 32 * 1.25 = 40`` s of a's 60 and b's 48.

    a is written from 8 to 24 s. b would be from 12 s on: the drive is booked, so it goes to host memory. Past host
    memory there is no lane before the drive's: a is written from 4 to 20 s, b would be from 8 s on.
    """
    links = replace(LINKS, **{f"{lane}_write": MiB / 4, f"{lane}_read": MiB / 4})
    plan = POLICIES["g10"](TRACE, 21 * MiB, links)
    assert {group.sites[0]: group.tier for group in plan.groups} == {"a:0": "nvme", "b:0": "dram"}
