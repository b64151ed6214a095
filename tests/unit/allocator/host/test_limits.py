"""A run under a memory limit degrades and says so; it is not killed."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.unit.limited import Cgroup, cgroup_refusal, run_under
from torch_tiers.allocator.sizes import MiB

LIMIT = 640 * MiB
SAVED = 800 * MiB  # a step


@pytest.fixture
def cgroup() -> Iterator[Cgroup]:
    if refusal := cgroup_refusal():
        pytest.skip(refusal)
    with Cgroup(LIMIT) as made:
        yield made


def test_the_limit_is_real(cgroup: Cgroup) -> None:
    assert run_under(cgroup, saved=SAVED, steps=1).returncode == -signal.SIGKILL


def test_a_run_under_a_cgroup_limit_goes_to_disk_and_says_why(cgroup: Cgroup) -> None:
    """The user asked for 64 GiB of dram."""
    plain = run_under(None, saved=SAVED, steps=2)
    done = run_under(cgroup, saved=SAVED, steps=2, hbm="64MiB", dram="64GiB", nvme="4GiB")
    print(done, cgroup.highest())
    assert done.returncode == 0
    assert len(done.said) == 1
    assert f"the cgroup {cgroup.path} leaves" in done.said[0]
    assert done.on_disk > 0
    assert done.losses == plain.losses


def test_a_quarter_of_the_limit_may_be_taken_at_once_while_the_tiers_are_full(cgroup: Cgroup) -> None:
    """As workers of a DataLoader do that begin to decode: within a quarter of a second, faster than disks make room."""
    done = run_under(
        cgroup, saved=SAVED, steps=3, others=LIMIT // 4, within=0.25, hbm="64MiB", dram="64GiB", nvme="4GiB"
    )
    print(done, cgroup.highest())
    assert (done.returncode, done.other_alive, len(done.said)) == (0, True, 1)
