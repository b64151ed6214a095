"""Every scenario of tests/scenarios on the CPU."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from tests.scenarios import FAMILIES, scenarios
from tests.unit import warm

pytestmark = [
    # Said by Dynamo and by Python of the programs, which are like other people's.
    pytest.mark.filterwarnings("default:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("default:.* is multi-threaded, use of fork"),
]

CASES = [(family, name) for family in FAMILIES for name in scenarios(family)]


@pytest.mark.parametrize(("family", "name"), CASES, ids=[f"{family}-{name}" for family, name in CASES])
def test_holds(family: str, name: str) -> None:
    # Only what those of the disk start is Python alone; Inductor's and multiprocessing's own hands over open files.
    with warm.interpreter() if family == "disk" else nullcontext():
        scenarios(family)[name](torch.device("cpu"))
