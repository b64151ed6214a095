from __future__ import annotations

import pytest

from tests.unit.migrator.policies.worked import LINKS, worked
from torch_tiers.allocator.sizes import MiB
from torch_tiers.migrator.policies import POLICIES
from torch_tiers.migrator.trace import Region

TRACE = worked(
    [4, 4, 8, 4, 4, 4],
    regions=[
        Region("s", 0, 4, (0,), 4 * MiB, 4.0),
        Region("s.0", 0, 2, (0,), 4 * MiB, 2.0),
        Region("s.1", 2, 4, (2,), 8 * MiB, 2.0),
        Region("t", 4, 6, (4,), 4 * MiB, 2.0),
    ],
)


@pytest.mark.parametrize(
    ("budget", "chosen"), [(28, ()), (27, ("s.0", "t")), (24, ("s.0", "t")), (20, ("s.0", "s.1", "t"))]
)
def test_checkpoint_by_hand(budget: int, chosen: tuple[str, ...]) -> None:
    """Chen et al., algorithm 3: the bound on a segment's bytes is searched.

    The modules save 20 (s), 8 (s.0), 12 (s.1) and 8 MiB (t)::

        bound   segments        held                    peak                             again
        0       -               28                      28                               0 s
        8       s.0, t          a, c, d, e: 20          f recomputed beside them: 24     4 s
        12      s.0, s.1, t     a, c, e: 16             f recomputed beside them: 20     6 s
        20      s, t            a, e: 8                 a beside b, c, d: 20             6 s
    """
    assert POLICIES["checkpoint"](TRACE, budget * MiB, LINKS).regions == chosen


def test_checkpoint_takes_the_lowest_peak_where_nothing_fits() -> None:
    assert POLICIES["checkpoint"](TRACE, 10 * MiB, LINKS).regions == ("s.0", "s.1", "t")


def test_a_module_that_saves_no_more_than_its_input_is_no_segment() -> None:
    trace = worked([4, 4], regions=[Region("norm", 0, 1, (0,), 4 * MiB, 1.0)])
    assert POLICIES["checkpoint"](trace, 0, LINKS).regions == ()
