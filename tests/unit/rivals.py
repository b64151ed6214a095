"""Two plans of one program, of which one recomputes what the other moves."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.traces import chain
from torch_tiers.allocator.sizes import MiB
from torch_tiers.migrator.learning.contest import (
    LAPS,
    WORTH,
)
from torch_tiers.migrator.learning.feedback import SETTLING
from torch_tiers.migrator.learning.made import Made
from torch_tiers.migrator.links import HARDLY, PCIE_GEN5, Links
from torch_tiers.migrator.plan import Plan
from torch_tiers.migrator.planner.build import make_plan
from torch_tiers.migrator.simulator import simulate
from torch_tiers.migrator.trace import Recipe, Trace

STEP = 0.1  # seconds
LATE = 1  # periods by which laps come late, from a learner's program
ROUND = SETTLING + LAPS  # periods
FIRST = LATE + ROUND  # the same right after a change of plans
BEFORE = FIRST + 1 + ROUND  # periods until a rival is carried out: to settle, to have it made, to compare it with
PERIODS = 8 * LAPS  # enough for any contest

# Six layers with an input and an output each, which can be made from it. In the forward the outputs move unnoticed.
SIZES = [4 * MiB, 6 * MiB] * 6
POSITIONS = 2 * len(SIZES)
TRACE = replace(
    chain(SIZES),
    times=tuple(STEP * (k + 1) / (POSITIONS + 1) for k in range(POSITIONS)),
    seconds=STEP,
    others=(0,) * (POSITIONS + 1),
    recipes={made: Recipe("Op", (made - 1,), WORTH * STEP / 3) for made in range(1, len(SIZES), 2)},
)
OUTPUTS = set(TRACE.recipes)
BUDGET = sum(SIZES) + MiB  # which is more than a rival leaves of it


def recomputes(trace: Trace, budget: int) -> Plan:
    return make_plan("test", trace, (), budget, dropped=OUTPUTS)


def moves(trace: Trace, budget: int) -> Plan:
    return make_plan("test", trace, OUTPUTS, budget)


def policy(trace: Trace, budget: int, links: Links) -> Plan:
    """Recomputes where moving costs what was measured, and moves where it hardly costs anything."""
    return moves(trace, budget) if links.costs == HARDLY else recomputes(trace, budget)


def made(plan: Plan, links: Links = PCIE_GEN5) -> Made:
    return Made(plan, simulate(TRACE, links, plan), asked=BUDGET)


HOLDER, RIVAL = made(recomputes(TRACE, BUDGET)), made(moves(TRACE, BUDGET), replace(PCIE_GEN5, costs=HARDLY))
