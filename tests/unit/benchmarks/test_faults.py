"""The table of faults in small: nothing is lost and nothing is left, whatever happens."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from benchmarks import direct_faults, faults
from benchmarks.faults import Skipped
from benchmarks.kills import Row, kills

FAULTS = {
    "writes fail": functools.partial(faults.writes_that_fail, range(1)),
    "reads fail": functools.partial(faults.reads_that_fail, range(2)),
    "transfers stop": faults.transfers_that_stop,
    "bits flip": functools.partial(faults.bits_that_flip, 10),
    "directory removed": functools.partial(faults.directory_that_is_removed, 1),
    "ext4 full": functools.partial(faults.filesystem_that_is_full, "ext4"),
    "tmpfs full": functools.partial(faults.filesystem_that_is_full, "tmpfs"),
    "killed": functools.partial(kills, 3),
    "writes fail directly": direct_faults.FAULTS[1],
    "short directly": direct_faults.FAULTS[5],
}


@pytest.mark.parametrize("name", FAULTS)
def test_nothing_is_lost_and_nothing_is_left(name: str) -> None:
    fault: Callable[[], Row] = FAULTS[name]
    try:
        row = fault()
    except Skipped as reason:
        pytest.skip(str(reason))
    print(row)
    assert row.times > 0
    assert (row.lost, row.left) == (0, 0)


def test_a_file_system_that_is_full_is_said_once() -> None:
    try:
        row = faults.filesystem_that_is_full("tmpfs")
    except Skipped as reason:
        pytest.skip(str(reason))
    assert "0 B left free, said 1 time(s)" in row.happened


def test_the_table_is_markdown() -> None:
    assert list(faults.table([Row("a fault", 2, "nothing", 0, 1)]))[2] == "| a fault | 2 | nothing | 0 | 1 |"
