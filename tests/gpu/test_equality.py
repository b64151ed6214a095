"""Losses and every gradient over 20 steps on a GPU are bitwise those of the program without tiers."""

from __future__ import annotations

import pytest

from tests.gpu.test_scenarios import on_gpu
from tests.programs import PROGRAMS


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("program", PROGRAMS)
def test_equal_at_every_budget(program: str) -> None:
    on_gpu("equality", program)
