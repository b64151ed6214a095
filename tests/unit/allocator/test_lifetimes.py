from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from allocator.lifetimes import Lifetime, peak_bytes


@st.composite
def lifetimes(draw: st.DrawFn) -> Lifetime:
    birth = draw(st.integers(0, 12))
    uses = draw(st.lists(st.integers(birth + 1, 24), max_size=3, unique=True))
    return Lifetime(0, draw(st.integers(0, 100)), birth, tuple(sorted(uses)))


def test_death_is_the_last_use() -> None:
    assert Lifetime(0, 1, birth=2, uses=(5, 9)).death == 9


def test_what_is_never_used_dies_at_birth() -> None:
    assert Lifetime(0, 1, birth=2, uses=()).death == 2


def test_nothing_alive_needs_nothing() -> None:
    assert peak_bytes([]) == 0


def test_two_that_touch_at_one_position_are_alive_together() -> None:
    assert peak_bytes([Lifetime(0, 3, 0, (4,)), Lifetime(1, 5, 4, (6,))]) == 8


def test_two_that_follow_one_another_share_memory() -> None:
    assert peak_bytes([Lifetime(0, 3, 0, (3,)), Lifetime(1, 5, 4, (6,))]) == 5


@given(st.lists(lifetimes(), max_size=10))
def test_the_peak_is_the_busiest_position(lives: list[Lifetime]) -> None:
    alive = [sum(life.nbytes for life in lives if life.birth <= at <= life.death) for at in range(26)]
    assert peak_bytes(lives) == max(alive)
