"""Losses and every gradient over ten steps are bitwise those of the program without tiers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch

import torch_tiers as tiers
from tests.programs import PROGRAMS, build, run
from tests.scenarios.equality import BUDGETS, PLANNED, STEPS, check, check_policy, plain
from torch_tiers.migrator.policies import POLICIES


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Let the threads of the runtime have the other core: OpenMP's would spin on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_equal_when(budget: str, program: str) -> None:
    check(program, budget, "cpu")


@pytest.mark.parametrize("program", PLANNED)
@pytest.mark.parametrize("policy", POLICIES)
def test_equal_under(policy: str, program: str) -> None:
    check_policy(program, policy, "cpu")


@cache
def needs(program: str) -> tuple[int, int]:
    """Bytes of HBM that a program needs for its weights alone, and with all that it saves."""
    model, _ = build(program, 0, "cpu")
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    with tiers.session(policy="keep", dram="64MiB") as session:
        run(program, 3, "cpu")
    return weights, session.stats()["peak"]["hbm"]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("fits", [0.2, 0.6, 1.5])
def test_equal_when_the_budget_holds(fits: float, program: str) -> None:
    """The default policy, which learns the room that a budget leaves."""
    weights, all_of_it = needs(program)
    hbm = int(weights + fits * (all_of_it - weights))
    with tiers.session(hbm=hbm, dram="64MiB") as session:
        assert run(program, STEPS["cpu"], "cpu") == plain(program, "cpu")
        print(f"{program}: hbm {hbm} of {all_of_it}, peak {session.stats()['peak']['hbm']}, {session.stats()['moved']}")
