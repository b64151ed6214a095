from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.migrator.policies.worked import LINKS, moves, worked
from torch_tiers.allocator.sizes import MiB
from torch_tiers.migrator.policies import POLICIES


def test_teraio_by_hand() -> None:
    """NeurIPS'25, 3.2: benefit over cost; a budget of 27 MiB less two groups of 2 MiB: 23.

    b has 8 MiB, the others 4; saved at 4, 8, ... 24 s, used at 64 (a), 56, 48, 40, 32 and 24 s (f). Over 23 MiB
    are 1 from 20 to 24 s, 5 to 32 s and 1 to 40 s::

        away                     benefit                     cost    over cost
        a   8 to 60 s            1 * 4 + 4 * 8 + 1 * 8 = 44  8 s     5.5       first
        b   16 to 48 s           1 * 4 + 5 * 8 + 1 * 8 = 52  16 s    3.25
        c   16 to 44 s           44                          8 s     5.5, of a shorter period

    1 MiB is then left over from 24 to 32 s: c 8/8, d 8/8 with a shorter period, b 8/16. So c. Each starts back at
    the latest moment: a at 60 s (position 10), c at 44 s (position 8).
    """
    trace = worked([4, 8, 4, 4, 4, 4], forward=4.0, backward=8.0)
    assert moves(POLICIES["teraio"](trace, 27 * MiB, LINKS)) == {"c": 8, "a": 10}


@pytest.mark.parametrize("lane", ["disk", "gds"])
def test_teraio_goes_to_host_memory_where_the_drive_is_saturated(lane: str) -> None:
    """The drive takes 8 s each way; 11 MiB are left, so four of six must go.

    a, b and c are away longest. They are written from 8, 16 and 24 s on, and read from 52, 44 and 36 s on. d would be
    written from 32 to 40 s, when backward asks for it; alone, it would have been from 20 to 28, and read until 36.
    Directly a, b and c are written from 4, 12 and 20 s on. d would be from 28 to 36 s, and is read from 32 s on.
    """
    links = replace(LINKS, **{f"{lane}_write": MiB / 2, f"{lane}_read": MiB / 2})
    plan = POLICIES["teraio"](worked([4] * 6, forward=4.0, backward=8.0), 15 * MiB, links)
    assert {group.sites[0]: group.tier for group in plan.groups} == {
        "a:0": "nvme", "b:0": "nvme", "c:0": "nvme", "d:0": "dram",
    }  # fmt: skip
