from __future__ import annotations

import pytest

from benchmarks.kills import kills


@pytest.mark.stress
@pytest.mark.timeout(900)
def test_fifty_kills_lose_and_leave_nothing() -> None:
    row = kills(50)
    print(row)
    assert (row.times, row.lost, row.left) == (50, 0, 0)
