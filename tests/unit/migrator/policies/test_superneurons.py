from __future__ import annotations

from tests.unit.migrator.policies.worked import LINKS, moves, remade, worked
from torch_tiers.allocator.sizes import MiB
from torch_tiers.migrator.model.trace import Recipe
from torch_tiers.migrator.policies import POLICIES

TRACE = worked(
    [4] * 8,
    recipes={
        2: Recipe("relu", (1,), 1.0),
        4: Recipe("native_batch_norm", (3,), 1.0),
        5: Recipe("relu", (4,), 1.0),
        6: Recipe("add", (1, 3), 1.0),
    },
)
"""Storages a to h; c is made from b, e from d, f from e, g is the sum of b and d."""


def test_superneurons_by_hand() -> None:
    """PPoPP'18: a budget of 20 MiB, of which two groups of 2 MiB come off: 16.

    The bottleneck is 4 MiB, what one layer needs. c and e are segments of 4 MiB: recomputed. f's segment, e and f, has
    8: memory-centric, and so left to the cache. g is a join: a checkpoint.

    Before the cache does anything HBM then holds, by stretch (c and e from where they are made, at positions 13
    and 11)::

        stretch   1  2   3    4    5     6     7      8       9       10     11    12    13   14   15  16
        holds     a  ab  ab   abd  abd   abdf  abdfg  abdfgh  abdfgh  abdfg  abdf  abde  abd  abc  ab  a
        MiB       4  8   8    12   12    16    20     24      24      20     16    16    12   12   8   4

    At stretch 7 HBM is too full for the first time: the least recently used, a, is evicted; at 8 b. In backward a
    comes back as the checkpointed layer before it is entered, which is b's, at 14; b as d's is, at 12.
    """
    plan = POLICIES["superneurons"](TRACE, 20 * MiB, LINKS)
    assert remade(plan) == ["c", "e"]
    assert moves(plan) == {"b": 12, "a": 14}


def test_superneurons_does_nothing_that_it_need_not() -> None:
    plan = POLICIES["superneurons"](TRACE, 32 * MiB, LINKS)
    assert (plan.groups, plan.recompute) == ((), ())


def test_superneurons_moves_nothing_where_recomputing_is_enough() -> None:
    plan = POLICIES["superneurons"](TRACE, 28 * MiB, LINKS)
    assert (remade(plan), moves(plan)) == (["c", "e"], {})
