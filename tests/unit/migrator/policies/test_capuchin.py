from __future__ import annotations

from tests.unit.migrator.policies.worked import LINKS, moves, remade, worked
from torch_tiers.allocator.sizes import MiB
from torch_tiers.migrator.model.trace import Recipe
from torch_tiers.migrator.policies import POLICIES

TRACE = worked(
    [4] * 6,
    forward=4.0,
    backward=8.0,
    recipes={3: Recipe("gelu", (2,), 3.0), 4: Recipe("gelu", (3,), 8.0)},
)
"""Saved at 4, 8, 12, 16, 20 and 24 s, used at 64 (a), 56, 48, 40, 32 and 24 s (f); a swap takes 4 s each way.

From 24 to 32 s, after the first use, all 24 MiB lie in HBM: the peak. Off every budget come two groups of 2 MiB.
"""


def test_capuchin_swaps_what_has_the_most_free_time() -> None:
    """ASPLOS'20, 4.3; a budget of 20 MiB leaves 16, so 8 must go. Memory is within that again at 40 s.

        FT = SwapInStart - SwapOutEnd:  a 60 - 8 = 52, b 52 - 12 = 40, c 44 - 16 = 28, d 16, e 4

    a and b are out before the peak, and start back at 60 and 52 s, after it. The last accesses before: 10 and 9.
    """
    plan = POLICIES["capuchin"](TRACE, 20 * MiB, LINKS)
    assert (moves(plan), remade(plan)) == ({"b": 9, "a": 10}, [])


def test_capuchin_weighs_what_does_not_hide_against_recomputing() -> None:
    """ASPLOS'20, 4.4 and 4.5; a budget of 12 MiB leaves 8, so 16 must go. Memory is within that again at 56 s.

    a hides: its way back starts at 60 s. The others' would start within the peak, and wait until it is over::

        swap list          overhead          MSPS list                          chosen
        b, starts at 52    56 - 52 = 4 s     d 4/3 MiB/s (3 s), e 4/8 (8 s)     d: 3 s
        b                  4 s               e 4/11: d must be made for it      b: 4 s
        c, starts at 44    56 - 44 = 12 s    e (11 s)                           e: 11 s

    c is kept: d is made from it.
    """
    plan = POLICIES["capuchin"](TRACE, 12 * MiB, LINKS)
    assert remade(plan) == ["d", "e"]
    assert moves(plan) == {"b": 9, "a": 10}
