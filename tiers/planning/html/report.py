"""The sections of the page, in their order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_tiers.migrator.model.plan import FRAGMENTS, LAYOUTS
from torch_tiers.migrator.policies import MODULES
from torch_tiers.planning.html.budgets import budgets
from torch_tiers.planning.html.groups import groups
from torch_tiers.planning.html.history import History
from torch_tiers.planning.html.lanes import lanes
from torch_tiers.planning.html.memory import memory
from torch_tiers.planning.html.planned import NO_PLAN, Planned
from torch_tiers.planning.html.prediction import prediction
from torch_tiers.planning.html.section import Section
from torch_tiers.planning.html.steps import steps
from torch_tiers.planning.in_dram import lay_below_hbm
from torch_tiers.planning.suggest import Offer, needed_of, offers


def sections(stats: Mapping[str, Any], history: History | str, plan: Planned | None) -> list[Section]:
    """Return all sections of a run; those of which it left nothing say so.

    Parameters
    ----------
    stats : mapping
        What was counted.
    history : History or str
        The steps, or why they are not known.
    plan : Planned or None
        The last plan; None if there was none that can be read.
    """
    budget = stats["budget"]["hbm"]
    return [
        memory(plan, budget),
        groups(plan),
        lanes(plan),
        prediction(plan, stats),
        steps(history),
        budgets(
            _offers(plan, stats),
            budget,
            None if plan is None else plan.answer.at_most or plan.answer.times_as_long,
            lay_below_hbm(stats),
        ),
    ]


def _offers(of: Planned | None, stats: Mapping[str, Any]) -> list[Offer] | str:
    """What other budgets come to, with the policy and the tiers of the run; or why that is not known."""
    if of is None:
        return NO_PLAN
    trace, links = of.trace, of.links
    if not (trace.times and trace.others):
        return (
            "The trace has no times, or does not tell what else lies in hbm, so nothing is predicted of other budgets."
        )
    policy = stats["policy"] if stats["policy"] in MODULES else "auto"
    free = FRAGMENTS if stats["allocator"] == "torch" else LAYOUTS
    dram = stats["budget"].get("dram")
    below = None if dram is None else dram + (stats["budget"]["nvme"] or 0)
    needed, in_dram = needed_of(trace, links, stats)
    return offers(trace, needed, links, policy, free=free, below=below, in_dram=in_dram)
