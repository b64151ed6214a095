"""Losses and every gradient over ten steps are bitwise those of the program without tiers."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import torch_tiers as tiers
from tests.programs import PROGRAMS, build, run
from tests.scenarios import moving
from tests.scenarios.equality import BUDGETS, PLANNED, STEPS, check, check_policy, plain
from torch_tiers.migrator.policies import POLICIES


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_equal_when(budget: str, program: str) -> None:
    check(program, budget, "cpu")


@pytest.mark.parametrize("program", PLANNED)
@pytest.mark.parametrize("policy", POLICIES)
def test_equal_under(policy: str, program: str) -> None:
    check_policy(program, policy, "cpu")


def test_equal_where_pytorch_computes_in_two_threads() -> None:
    """As programs do; all else here has one."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = run("cnn_bn", 5, "cpu")
        with moving(share=2 / 3, recompute=True) as session:
            assert run("cnn_bn", 5, "cpu") == expected
            assert session.stats()["moved"]["h2d"] > 0
    finally:
        torch.set_num_threads(before)


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
