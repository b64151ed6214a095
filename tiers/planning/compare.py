"""What policies make of a trace, by simulation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Column, Table

from torch_tiers.allocator.sizes import format_at_least, format_size
from torch_tiers.migrator.model.links import BOUNDLESS, Links
from torch_tiers.migrator.model.plan import NoPlanFits, Plan
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.planner.low_traffic import crossing
from torch_tiers.migrator.policies import POLICIES
from torch_tiers.migrator.simulator import Simulated, simulate


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan and what it comes to; `below` is what the tiers below HBM hold, if that is known."""

    plan: Plan
    result: Simulated
    below: int | None = None

    def fits(self, budget: int) -> bool:
        """Whether HBM holds no more than the budget, and the tiers below it all that moves."""
        return self.result.peak["hbm"] <= budget and self.fits_below

    @property
    def fits_below(self) -> bool:
        """Whether the tiers below HBM hold all that moves."""
        return self.below is None or self.plan.stored_bytes <= self.below


@dataclass(frozen=True, slots=True)
class Refused:
    """A policy that found no plan, and why."""

    text: str


Outcomes = dict[str, Candidate | Refused]


def compare(trace: Trace, budget: int, links: Links, policies: Sequence[str], below: int | None = None) -> Outcomes:
    """Have each policy plan, and simulate what it planned; `below` is what the tiers below HBM hold."""
    outcomes: Outcomes = {}
    for name in policies:
        try:
            plan = POLICIES[name](trace, budget, links)
        except NoPlanFits as error:
            # The error's own text names the variable of a run, where here it is the budget that was asked about.
            within = f"no plan keeps this program within {format_size(budget)} of hbm"
            outcomes[name] = Refused(f"{within}: it needs {format_at_least(error.smallest)} ({error.holds})")
        except ModuleNotFoundError as error:  # a policy that wants an extra must not take the others with it
            outcomes[name] = Refused(str(error))
        else:
            outcomes[name] = Candidate(plan, simulate(trace, links, plan), below)
    return outcomes


def to_json(trace: Trace, budget: int, links: Links, outcomes: Outcomes, below: int | None = None) -> dict[str, Any]:
    """The comparison as JSON; seconds are null where the trace has no times."""
    return {
        "budget": budget,
        "below": below,
        "links": {name: None if value == BOUNDLESS else value for name, value in asdict(links).items()},
        "ideal_s": trace.seconds if trace.times else None,
        "policies": {name: _entry(trace, budget, links, outcome) for name, outcome in outcomes.items()},
    }


def _entry(trace: Trace, budget: int, links: Links, outcome: Candidate | Refused) -> dict[str, Any]:
    if isinstance(outcome, Refused):
        return {"error": outcome.text}
    plan, result = outcome.plan, outcome.result
    return {
        "step_s": result.seconds if trace.times else None,
        "fraction_of_ideal": result.fraction if trace.times else None,
        "fits": outcome.fits(budget),
        "peak": dict(result.peak),
        "kept_bytes": plan.kept_bytes,
        "moved_bytes": plan.moved_bytes,
        "bus_bytes": crossing(plan, links),
        "groups": len(plan.groups),
        "recomputed_sites": len(plan.recompute),
        "recomputing_s": result.recomputing,
        "stalls_s": dict(result.stalls),
        "busy_s": dict(result.busy),
    }


def render(
    trace: Trace, budget: int, links: Links, outcomes: Outcomes, below: int | None = None
) -> Iterator[RenderableType]:
    """The comparison as a table, the fastest first."""
    yield (
        f"{len(trace.sites)} sites, {format_size(trace.saved_bytes)} saved, into {format_size(budget)} of hbm"
        + ("" if below is None else f" and {format_size(below)} below it")
        + (f"; ideal step {_ms(trace.seconds)}" if trace.times else "")
    )
    if not trace.others:
        yield "the trace does not tell what else lies in hbm: the budget is taken as room for saved tensors alone"
    if not trace.times:
        yield "the trace has no times: memory only"
    if trace.varies:
        yield "sizes change from step to step: this iteration is the largest recorded, and its times are uncertain"
    # On 80 columns words wrap, names and numbers do not.
    columns = (
        Column(name, no_wrap=name not in ("peak hbm", "moved"))
        for name in ("policy", "step", "of ideal", "peak hbm", "moved")
    )
    table = Table(*columns, "recomputed", "stalls", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    found = [(name, outcome) for name, outcome in outcomes.items() if isinstance(outcome, Candidate)]
    for name, outcome in sorted(found, key=lambda pair: (not pair[1].fits(budget), pair[1].result.seconds)):
        plan, result = outcome.plan, outcome.result
        table.add_row(
            name,
            _ms(result.seconds) if trace.times else "unknown",
            f"{result.fraction:.3f}" if trace.times else "unknown",
            format_size(result.peak["hbm"]) + ("" if result.peak["hbm"] <= budget else ", over"),
            format_size(plan.moved_bytes) + ("" if outcome.fits_below else ", over"),
            f"{len(plan.recompute)} sites" if plan.recompute else "",
            ", ".join(f"{lane} {_ms(seconds)}" for lane, seconds in result.stalls.items() if seconds > 5e-5),
        )
    if found:
        yield table
    if links.has_drive and found:  # a drive may be reached past host memory, or through it
        crossings = (f"{name} {format_size(crossing(outcome.plan, links))}" for name, outcome in found)
        yield f"over the host's memory bus in an iteration: {', '.join(crossings)}"
    for name, refused in outcomes.items():
        if isinstance(refused, Refused):
            yield f"{name}: {refused.text}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
