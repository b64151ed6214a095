from __future__ import annotations

import pytest

from tests.unit.limited import Cgroup, cgroup_refusal, run_under
from torch_tiers.allocator.sizes import GiB, MiB


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_a_run_under_4_gib_is_never_killed() -> None:
    """A step saves 5 GiB, the user asked for 64 GiB of dram, and another process takes 512 MiB half-way."""
    if refusal := cgroup_refusal():
        pytest.skip(refusal)
    with Cgroup(4 * GiB) as cgroup:
        done = run_under(cgroup, saved=5 * GiB, others=GiB // 2, hbm="64MiB", dram="64GiB", nvme="16GiB")
        print(done, cgroup.highest())
    assert done.returncode == 0
    assert len(done.said) == 1
    assert done.on_disk > 0


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_others_may_take_1_gib_of_4_within_a_second() -> None:
    """While the tiers are full, and a disk has no time to make room."""
    if refusal := cgroup_refusal():
        pytest.skip(refusal)
    with Cgroup(4 * GiB) as cgroup:
        done = run_under(
            cgroup, saved=5 * GiB, steps=3, others=GiB, within=1.0, hbm="64MiB", dram="64GiB", nvme="16GiB"
        )
        print(done, cgroup.highest())
    assert (done.returncode, done.other_alive, len(done.said)) == (0, True, 1)
    assert done.on_disk > 0


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_what_others_take_while_it_runs_the_arena_gives_back() -> None:
    """More than is kept for the program: what is not given back would end it."""
    if refusal := cgroup_refusal():
        pytest.skip(refusal)
    with Cgroup(GiB) as cgroup:
        done = run_under(cgroup, saved=1280 * MiB, steps=8, others=192 * MiB, hbm="64MiB", dram="64GiB", nvme="4GiB")
        print(done, cgroup.highest())
    assert done.returncode == 0
    assert len(done.said) == 1
