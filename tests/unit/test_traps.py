"""Every scenario of tests/scenarios on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.scenarios import FAMILIES, scenarios
from tests.unit.natively import needs_compiler

pytestmark = [
    # Said by Dynamo and by Python of the programs, which are like other people's.
    pytest.mark.filterwarnings("default:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("default:.* is multi-threaded, use of fork"),
]

CASES = [(family, name) for family in FAMILIES for name in scenarios(family)]

CLOSE_TO_THE_HOOKS = ("hooks", "quiet", "recompute", "surprises", "threads", "version_check")
NATIVELY = [(family, name) for family, name in CASES if family in CLOSE_TO_THE_HOOKS]
NATIVELY.append(("compiled", "our_own_functions_are_not_compiled"))


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


@needs_compiler
@pytest.mark.parametrize(("family", "name"), NATIVELY, ids=[f"{family}-{name}" for family, name in NATIVELY])
def test_holds_natively(family: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what is done for every tensor in C++, as on a GPU."""
    monkeypatch.setenv("TIERS_NATIVE", "on")
    scenarios(family)[name](torch.device("cpu"))
