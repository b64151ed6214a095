from __future__ import annotations

import pytest

from tests.unit.migrator.policies.worked import LINKS, remade
from torch_tiers.allocator.sizes import MiB
from torch_tiers.migrator.model.trace import Recipe, Site, Trace
from torch_tiers.migrator.policies import POLICIES

# Modules s.0, s.1 and t of two layers each; every layer's storage is made in a second from the one before it.
SIZES = {"s.0.a": 4, "s.0.b": 4, "s.1.c": 8, "s.1.d": 4, "t.e": 4, "t.f": 4}
TRACE = Trace(
    sites=tuple(Site(f"{path}:0", k, size * MiB, k, (11 - k,)) for k, (path, size) in enumerate(SIZES.items())),
    positions=12,
    times=tuple(float(second) for second in range(12)),
    seconds=12.0,
    recipes={k: Recipe("Op", (k - 1,), 1.0) for k in range(1, 6)},
)


@pytest.mark.parametrize(("budget", "again"), [(28, ""), (27, "bf"), (24, "bf"), (20, "bdf")])
def test_checkpoint_by_hand(budget: int, again: str) -> None:
    """Chen et al., algorithm 3: the bound on a segment's bytes is searched.

    The modules save 20 (s), 8 (s.0), 12 (s.1), 8 (t), and their layers 4 or 8 MiB. What a segment begins with is held::

        bound   segments        held                    peak                             again
        0       -               28                      28                               0 s
        8       s.0, t          a, c, d, e: 20          f recomputed beside them: 24     2 s
        12      s.0, s.1, t     a, c, e: 16             f recomputed beside them: 20     3 s
        20      s, t            a, e: 8                 a beside b, c, d: 20             4 s
    """
    plan = POLICIES["checkpoint"](TRACE, budget * MiB, LINKS)
    assert "".join(path[-1] for path in remade(plan)) == again


def test_checkpoint_takes_the_lowest_peak_where_nothing_fits() -> None:
    assert [path[-1] for path in remade(POLICIES["checkpoint"](TRACE, 10 * MiB, LINKS))] == ["b", "d", "f"]
