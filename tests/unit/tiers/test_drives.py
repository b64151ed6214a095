"""How fast a store's directories are together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from torch_tiers.drives import rates


def together(*speeds: tuple[float | None, float | None]) -> tuple[float, float]:
    directories = {
        number: SimpleNamespace(choice=SimpleNamespace(write=write, read=read))
        for number, (write, read) in enumerate(speeds)
    }
    decision: Any = SimpleNamespace(directories=directories)
    return rates(decision)


def test_directories_that_are_as_fast_add_up() -> None:
    assert together((3e9, 6e9), (3e9, 6e9)) == pytest.approx((6e9, 12e9))


def test_a_slow_directory_slows_the_others_no_more_than_by_its_own_share() -> None:
    assert together((4e9, 8e9), (1e9, 2e9)) == pytest.approx((5e9, 10e9))


def test_one_that_reads_faster_than_it_writes_is_waited_for() -> None:
    """Each has one share, of what is written and of what is read."""
    write, read = together((4e9, 4e9), (2e9, 6e9))
    assert 4e9 < write < 6e9
    assert 4e9 < read < 10e9


@pytest.mark.parametrize("unknown", [(None, None), (None, 2e9)])
def test_nothing_is_known_together_if_one_is_not_known(unknown: tuple[float | None, float | None]) -> None:
    assert together((4e9, 8e9), unknown) == (0.0, 0.0)


def test_there_is_no_rate_without_directories() -> None:
    assert together() == (0.0, 0.0)
