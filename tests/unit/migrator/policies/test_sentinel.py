from __future__ import annotations

from tests.unit.migrator.policies.worked import LINKS, moves, worked
from torch_tiers.allocator.sizes import MiB
from torch_tiers.migrator.planner.draft import Draft
from torch_tiers.migrator.policies import POLICIES
from torch_tiers.migrator.policies.sentinel import feasible, migrate

TRACE = worked([4] * 6, forward=4.0, backward=8.0)
"""Twelve layers of the step: forward at positions 0 to 5, backward at 6 (f) to 11 (a)."""


def test_sentinel_knows_the_interval_lengths_that_are_feasible() -> None:
    """HPCA'21: S is 20 MiB, the step has 64 s up to the last use. In MiB and seconds::

    MIL    Tensor    RS                    Tensor + RS < 20    T(MIL) > Tensor / BW
    1      4         0                     yes                 5.3 > 4
    2      8         0                     yes                 10.7 > 8
    3      12        0                     yes                 16 > 12
    4      16        8 (e, f)              no
    5      12        4 (f)                 yes                 21.3 > 12
    6      24        0                     no
    """
    starts = feasible(Draft(TRACE, 20 * MiB, LINKS), 20 * MiB)
    assert [cuts[1] - cuts[0] for cuts in starts] == [1, 2, 3, 5]


def test_sentinel_brings_back_an_interval_ahead() -> None:
    """With MIL = 2 intervals begin at 0, 2, 4, 6, 8 and 10; 16 MiB are left beside two groups, so 8 must go.

    The coldest are a and b, needed in the last interval: they come as the one before it begins, at 8.
    """
    assert moves(migrate(TRACE, 20 * MiB, LINKS, range(0, 12, 2))) == {"b": 8, "a": 8}


def test_sentinel_moves_nothing_that_the_next_interval_needs() -> None:
    """With MIL = 6 backward is the next interval: whatever leaves does so because there is no room, and by itself."""
    assert {*moves(migrate(TRACE, 20 * MiB, LINKS, range(0, 12, 6))).values()} == {None}


def test_sentinel_takes_the_fastest_of_its_trials() -> None:
    """MIL = 1 has a and b back just in time, at 9 and 10: no trial is faster."""
    assert moves(POLICIES["sentinel"](TRACE, 20 * MiB, LINKS)) == {"b": 9, "a": 10}
