from __future__ import annotations

import sys

import pytest

from tests.unit.migrator.policies.worked import LINKS, moves, worked
from torch_tiers.allocator.sizes import MiB
from torch_tiers.migrator.policies import POLICIES

TRACE = worked([6, 12, 4, 4], forward=6.0, backward=8.0)
"""Saved at 6, 12, 18 and 24 s, used at 48 (a), 40, 32 and 24 s (d). Every stretch is a node."""


def test_autotm_by_hand() -> None:
    """ASPLOS'20: a budget of 25 MiB less two groups of 2 MiB: 21.

    Over that are 1 MiB from 18 to 24 s, 5 to 32 s and 1 to 40 s. c is too small, d has no idle time, and b's 12 s out
    exceed the node of 6 s beside it. a costs nothing: the node from 6 to 12 s hides its way out, and that from 40
    to 48 s (position 6) its way back; one node earlier it would be over the budget.
    """
    assert moves(POLICIES["autotm"](TRACE, 25 * MiB, LINKS)) == {"a": 6}


def test_autotm_pays_for_a_synchronous_move_only_where_it_must() -> None:
    """A budget of 22 MiB leaves 18, and so 2 MiB more to go from 24 to 32 s.

    c's way out hides from 18 to 24 s; its way back is synchronous at its use: 4 s. b beside a would cost 6 s on its
    way out and 4 on its way back, where its 12 s exceed the nodes of 6 and of 8 s.
    """
    assert moves(POLICIES["autotm"](TRACE, 22 * MiB, LINKS)) == {"c": 5, "a": 6}


def test_without_scipy_autotm_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ModuleNotFoundError, match="pip install scipy"):
        POLICIES["autotm"](TRACE, 25 * MiB, LINKS)
