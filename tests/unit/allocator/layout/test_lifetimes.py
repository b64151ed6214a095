from __future__ import annotations

from torch_tiers.allocator.layout.lifetimes import Lifetime


def test_death_is_the_last_use() -> None:
    assert Lifetime(0, 1, birth=2, uses=(5, 9)).death == 9


def test_what_is_never_used_dies_at_birth() -> None:
    assert Lifetime(0, 1, birth=2, uses=()).death == 2
