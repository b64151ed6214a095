"""Every scenario of tests/scenarios on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.scenarios import FAMILIES, scenarios

pytestmark = [
    # Said by Dynamo and by Python of the programs, which are like other people's.
    pytest.mark.filterwarnings("default:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("default:.* is multi-threaded, use of fork"),
]

CASES = [(family, name) for family in FAMILIES for name in scenarios(family)]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Let the threads of the runtime have the other core: OpenMP's would spin on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("family", "name"), CASES, ids=[f"{family}-{name}" for family, name in CASES])
def test_holds(family: str, name: str) -> None:
    scenarios(family)[name](torch.device("cpu"))
