"""The benchmark of how host memory is counted, as far as it needs no GPU."""

from __future__ import annotations

import pytest

from benchmarks.host_memory_accounting import ask
from tests.unit.limited import Cgroup, cgroup_refusal
from torch_tiers.allocator.sizes import MiB

SIZE = 64 * MiB


def test_what_is_touched_is_resident_and_what_is_locked_counts_as_locked() -> None:
    mapped, locked = ask("mapped and touched", SIZE), ask("mlock", SIZE)
    assert mapped.outcome == "granted" and 0.9 * SIZE < mapped.grown["VmRSS"] < 1.5 * SIZE
    assert (mapped.grown["VmLck"], locked.grown["VmLck"]) == (0, SIZE)


def test_the_limit_on_locked_memory_holds_for_root_as_well() -> None:
    assert ask("mapped and touched", SIZE, memlock=True).outcome == "granted"
    assert ask("mlock", SIZE, memlock=True).outcome.startswith("refused: [Errno 12]")


def test_a_process_that_its_cgroup_ends_is_said_to_be_killed() -> None:
    if refusal := cgroup_refusal():
        pytest.skip(refusal)
    with Cgroup(512 * MiB) as cgroup:
        assert ask("mapped and touched", SIZE, cgroup=cgroup).grown["cgroup"] > 0.9 * SIZE
        assert ask("mapped and touched", 1024 * MiB, cgroup=cgroup).outcome == "killed"
