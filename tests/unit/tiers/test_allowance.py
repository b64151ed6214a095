"""What may be taken of a core."""

from __future__ import annotations

import pytest

from torch_tiers.monitor.allowance import Allowance


def test_what_is_taken_is_the_part_of_a_core_on_average() -> None:
    allowance, now, spent = Allowance(0.01, 0.05), 100.0, 0.0
    begin = now
    for _ in range(1000):
        spent += 0.02
        now += 0.1 + allowance.take(0.02, now)
    assert spent / (now - begin) == pytest.approx(0.01, rel=0.02)


def test_one_dear_look_does_not_blind_for_seconds() -> None:
    """The first took 25 ms: a load that began then was seen nine steps later."""
    allowance = Allowance(0.01, 0.05)
    assert allowance.take(0.025, 0.0) == 0
    assert allowance.take(0.001, 0.3) == 0


def test_what_is_saved_up_has_an_end() -> None:
    allowance = Allowance(0.01, 0.05)
    allowance.take(0.0, 0.0)
    assert allowance.take(0.15, 1e6) == pytest.approx(10.0)
