"""Every program of the zoo under every policy, bit for bit what it is without tiers; half an hour on a CPU.

On a GPU, if there is one, with deterministic kernels. A program without these is skipped.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
from torch import distributed

from benchmarks.zoo.program import PROGRAMS, Unavailable, maker
from tests.programs import deterministic_kernels
from tests.scenarios import bits, moving
from torch_tiers.migrator.controller import plan_requests
from torch_tiers.migrator.model.links import Links
from torch_tiers.migrator.model.plan import NoPlanFits, Plan
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.policies import POLICIES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 6
STEPS_OF = {"moe": 11}  # until some have run under a plan, as rows of experts change from step to step
STAYS = (0.7, 0.3, 0.0)
"""Of what is saved, as far as the budget goes that policies are given."""


@cache
def plain(name: str) -> list[bytes]:
    return results(name)


def results(name: str) -> list[bytes]:
    """The losses, and what training left of weights and of the optimizers' moments, which gradients went into."""
    losses: list[torch.Tensor] = []
    try:
        with deterministic_kernels():
            program = maker(name)("cpu", DEVICE, False)
            program.train(STEPS_OF.get(name, STEPS), losses.append)
            return bits([*losses, *program.state()])
    except Unavailable as error:
        pytest.skip(str(error))
    except RuntimeError as error:
        if "does not have a deterministic implementation" in str(error):
            pytest.skip(str(error).splitlines()[0])
        raise
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


@pytest.mark.stress
@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "autotm" or find_spec("scipy") is not None])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_the_same_under_every_policy(name: str, policy: str) -> None:
    expected = plain(name)
    for stays in STAYS:
        made: list[Plan] = []

        def within_less(trace: Trace, budget: int, links: Links, stays: float = stays, made: list[Plan] = made) -> Plan:
            for share in (stays, *(0.05 * k for k in range(1, 20) if 0.05 * k > stays)):
                try:
                    made.append(POLICIES[policy](trace, max(trace.others) + int(share * trace.saved_bytes), links))
                except NoPlanFits:  # some need a part of it at once
                    continue
                return made[-1]
            raise AssertionError("no plan fits")

        # These steps are over before a planner beside them is done.
        with mock.patch.object(plan_requests, "AT_ONCE", sys.maxsize), moving(plan=within_less) as session:
            ours = results(name)
            saver = session.runtime.saver()
            assert saver is not None
            carried_out = [plan for mover in saver.movers.armed for plan in mover.learner.plans]
        assert [k for k, pair in enumerate(zip(ours, expected, strict=True)) if pair[0] != pair[1]] == []
        assert carried_out and all(plan in made for plan in carried_out)
        again = sum(len(plan.recompute) for plan in carried_out)
        print(f"{name}, {policy}, {stays:.0%} stay: {session.stats()['moved']['d2h']} bytes moved, {again} recomputed")
