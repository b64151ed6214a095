from __future__ import annotations

from dataclasses import replace

from tests.unit.migrator.policies.worked import LINKS, moves, worked
from torch_tiers.allocator.sizes import MiB
from torch_tiers.migrator.policies import POLICIES


def test_ssdtrain_by_hand() -> None:
    """SSDTrain, adaptive keep; 12 MiB and 4 s a layer, 1 MiB a second::

        n    V_prev + 2 * v_n    3 * T_fwd - 2 * sum(t_prev)
        0    24                  72
        1    36                  64
        2    48                  56
        3    60                  48          more than the bandwidth: d and all after it are kept

    Each is prefetched as backward enters the layer behind it: c with d (position 8), b with c, a with b.
    """
    trace = worked([12] * 6, forward=4.0, backward=8.0)
    assert moves(POLICIES["ssdtrain"](trace, 100 * MiB, LINKS)) == {"c": 8, "b": 9, "a": 10}


def test_ssdtrain_keeps_the_last_layer_and_what_is_small() -> None:
    """12 * n + 8 never exceeds 72 - 8 * n before the last layer, f; c has less than a MiB."""
    trace = worked([4, 4, 0, 4, 4, 4], forward=4.0, backward=8.0)
    small = replace(trace.sites[2], nbytes=MiB - 1)
    trace = replace(trace, sites=(*trace.sites[:2], small, *trace.sites[3:]))
    assert moves(POLICIES["ssdtrain"](trace, 100 * MiB, LINKS)).keys() == {"a", "b", "d", "e"}


def test_ssdtrain_offloads_to_the_disk_at_its_speed() -> None:
    """At half a MiB a second: 60 of n = 3 exceed 24, 48 of n = 2 exceed 28, 36 of n = 1 exceed 32, 24 not 36."""
    links = replace(LINKS, disk_write=MiB / 2, disk_read=MiB / 2)
    plan = POLICIES["ssdtrain"](worked([12] * 6, forward=4.0, backward=8.0), 100 * MiB, links)
    assert [(group.sites, group.tier) for group in plan.groups] == [(("a:0",), "nvme")]


def test_ssdtrain_offloads_past_dram_at_the_speed_of_that_lane() -> None:
    """As above; how slow the lane to DRAM is does not matter."""
    links = replace(LINKS, gds_write=MiB / 2, gds_read=MiB / 2, d2h=MiB / 8, h2d=MiB / 8)
    plan = POLICIES["ssdtrain"](worked([12] * 6, forward=4.0, backward=8.0), 100 * MiB, links)
    assert [(group.sites, group.tier) for group in plan.groups] == [(("a:0",), "nvme")]
