"""The collector's threshold, raised by what the hooks hold."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from torch_tiers.migrator.saved.garbage import Allowance


class Owner:
    """Somebody who holds objects."""


@pytest.fixture(autouse=True)
def _threshold() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_the_collector_allows_what_all_owners_hold_and_no_more() -> None:
    allowance, one, other = Allowance(), Owner(), Owner()
    allowance.hold(one, 1000)
    allowance.hold(other, 200)
    assert gc.get_threshold() == (1900, 10, 10)
    allowance.hold(one, 50)
    assert gc.get_threshold() == (950, 10, 10)
    del one
    allowance.hold(other, 300)
    assert gc.get_threshold() == (1000, 10, 10)
    allowance.close()
    assert gc.get_threshold() == (700, 10, 10)


def test_a_threshold_that_the_program_sets_is_the_program_s() -> None:
    allowance, owner = Allowance(), Owner()
    allowance.hold(owner, 1000)
    gc.set_threshold(5, 5, 5)
    allowance.hold(owner, 2000)
    allowance.close()
    assert gc.get_threshold() == (5, 5, 5)


def test_a_collector_that_is_switched_off_stays_off() -> None:
    gc.set_threshold(0, 10, 10)
    allowance, owner = Allowance(), Owner()
    allowance.hold(owner, 1000)
    assert gc.get_threshold()[0] == 0


def test_nothing_is_raised_once_it_is_closed() -> None:
    allowance, owner = Allowance(), Owner()
    allowance.close()
    allowance.hold(owner, 1000)
    assert gc.get_threshold() == (700, 10, 10)
