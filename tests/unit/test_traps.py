"""Every scenario of tests/scenarios on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.scenarios import FAMILIES, scenarios

CASES = [(family, name) for family in FAMILIES for name in scenarios(family)]


@pytest.mark.parametrize(("family", "name"), CASES, ids=[f"{family}-{name}" for family, name in CASES])
def test_holds(family: str, name: str) -> None:
    scenarios(family)[name](torch.device("cpu"))
