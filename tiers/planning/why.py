"""Why a step takes what it takes: what the last plan does with saved tensors, what that costs, what would help."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from torch_tiers.allocator.sizes import format_size
from torch_tiers.migrator.model.links import Links
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.planner.intervals import where_fullest
from torch_tiers.migrator.simulator import Simulated, simulate
from torch_tiers.planning.in_dram import read_in_dram
from torch_tiers.run_directory import ENOUGH, by_iteration, step_seconds

CLOSE = 0.98  # of ideal: nothing worth a word is left
LATE = 1.1  # times the predicted iteration: something happens that no plan knows of
CROWDED = 0.8  # of the budget in use by what is no saved tensor
UNFORESEEN = 0.02  # of the budget: what moves in an iteration besides what the plan says


@dataclass(frozen=True, slots=True)
class Action:
    """What a plan does with some of the saved tensors.

    Attributes
    ----------
    what : str
        ``kept``, ``moved``, or what they are recomputed by.
    sites : int
        How many.
    nbytes : int
        Of their storages, each counted once.
    seconds : float
        What that takes the device in an iteration; what the lanes carry meanwhile is not in it.
    """

    what: str
    sites: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Why:
    """A plan, and what it comes to beside what was measured.

    Attributes
    ----------
    actions : tuple of Action
        What is done with what was saved.
    result : Simulated
        What that comes to.
    streaming, streaming_state : float
        Seconds that compute waited in an iteration for streamed weights, and for optimizer state that came to HBM, as
        measured: no plan knows of them.
    measured : float or None
        Seconds that an iteration took, in the median of the steps under the last plan.
    fullest : str
        Where HBM holds most, and what.
    hints : tuple of str
        What would help, where something would.
    varies : bool
        Sizes change from step to step: nothing is predicted of what one takes.
    in_dram : str
        What operators read in DRAM, in the iteration with everything kept, too: that is no ideal.
    """

    actions: tuple[Action, ...]
    result: Simulated
    streaming: float
    streaming_state: float
    measured: float | None
    fullest: str
    hints: tuple[str, ...]
    varies: bool = False
    in_dram: str = ""

    @property
    def predicted(self) -> float:
        """Seconds of an iteration: as the plan has it, and what it waited for weights and optimizer state."""
        return self.result.seconds + self.streaming + self.streaming_state


def why(trace: Trace, plan: Plan, links: Links, stats: dict[str, Any]) -> Why:
    """Account for a run whose last trace and plan these are, and whose stats.json held `stats`."""
    result = simulate(trace, links, plan)
    median = step_seconds(stats)
    measured = None if median is None else median * stats["steps"] / max(stats["iterations"], stats["steps"], 1)
    actions = tuple(_actions(trace, plan))
    stalled = by_iteration(stats)[1] if {"weights", "state"} & stats.get("stalls", {}).keys() else {}
    streaming, streaming_state = (stalled.get(cause, 0.0) for cause in ("weights", "state"))
    hints = tuple(_hints(trace, plan, result, streaming, streaming_state, measured, stats))
    fullest = where_fullest(trace, result.hbm)
    return Why(actions, result, streaming, streaming_state, measured, fullest, hints, trace.varies, read_in_dram(stats))


def to_json(why: Why) -> dict[str, Any]:
    """The account as JSON; seconds are of one iteration."""
    result = why.result
    return {
        "actions": [{"what": d.what, "sites": d.sites, "bytes": d.nbytes, "seconds": d.seconds} for d in why.actions],
        "sizes_change": why.varies,
        "ideal_s": None if why.varies or why.in_dram else result.ideal,
        "recomputing_s": None if why.varies else result.recomputing,
        "stalls_s": None if why.varies else dict(result.stalls),
        "beside_lanes_s": None if why.varies else result.slowed,
        "host_s": None if why.varies else waiting_for_host(result),
        "streaming_s": None if why.varies else why.streaming,
        "streaming_state_s": None if why.varies else why.streaming_state,
        "predicted_s": None if why.varies else why.predicted,
        "measured_s": why.measured,
        "fullest": why.fullest,
        "hints": list(why.hints),
    }


def render(why: Why) -> Iterator[RenderableType]:
    """The account as tables and lines."""
    table = Table("what", "sites", "bytes", "time", title="saved tensors, by the last plan", title_justify="left")
    for action in why.actions:
        table.add_row(
            action.what, str(action.sites), format_size(action.nbytes), _ms(action.seconds) if action.seconds else ""
        )
    yield table
    yield f"hbm at its fullest: {why.fullest}"
    result = why.result
    if why.varies:
        yield (
            "the sizes of what is saved change from step to step: the plan is for the largest one that was recorded, "
            "and what a step takes is not predicted"
        )
    elif result.ideal:
        kept, whole = ("everything kept", "kept = 100%") if why.in_dram else ("everything kept (ideal)", "ideal = 100%")
        table = Table("part", "time", whole, title="an iteration, as it was predicted", title_justify="left")
        stalls = {f"waiting for {lane}": seconds for lane, seconds in result.stalls.items() if seconds > 5e-5}
        parts = {kept: result.ideal, "recomputing": result.recomputing, **stalls}
        late = waiting_for_host(result)
        parts |= {"slower beside busy lanes": result.slowed, "waiting for the host": late}
        parts |= {"waiting for weights (measured)": why.streaming}
        parts |= {"waiting for optimizer state (measured)": why.streaming_state, "predicted": why.predicted}
        if why.measured is not None:
            parts["measured (median)"] = why.measured
        for part, seconds in parts.items():
            if seconds > 5e-5:
                table.add_row(part, _ms(seconds), f"{seconds / result.ideal:.1%}")
        yield table
    yield from why.hints


def waiting_for_host(result: Simulated) -> float:
    """Seconds for which compute has nothing to do, beyond those of the step with everything kept."""
    rest = result.seconds - result.ideal - result.recomputing - result.slowed - sum(result.stalls.values())
    return max(0.0, rest)


def _actions(trace: Trace, plan: Plan) -> Iterator[Action]:
    storage_of = {site.key: site.storage for site in trace.sites}
    yield Action("kept", len(plan.keep), plan.kept_bytes, 0.0)
    if plan.groups:
        sites = sum(len(group.sites) for group in plan.groups)
        yield Action(f"moved, in {len(plan.groups)} groups", sites, plan.moved_bytes, 0.0)
    by_operation: dict[str, list[str]] = defaultdict(list)
    for key in plan.recompute:
        recipe = trace.recipes.get(storage_of.get(key, -1))
        by_operation[recipe.op if recipe else "?"].append(key)
    recomputed = []
    for operation, keys in by_operation.items():
        storages = {storage_of[key] for key in keys if key in storage_of}
        nbytes = sum(trace.storage_bytes.get(ident, 0) for ident in storages)
        seconds = sum(trace.recipes[ident].seconds for ident in storages)
        recomputed.append(Action(f"recomputed by {operation}", len(keys), nbytes, seconds))
    yield from sorted(recomputed, key=lambda action: -action.nbytes)


def _hints(
    trace: Trace,
    plan: Plan,
    result: Simulated,
    streaming: float,
    streaming_state: float,
    measured: float | None,
    stats: dict[str, Any],
) -> Iterator[str]:
    others, budget = max(trace.others, default=0), stats["budget"]["hbm"]
    if lay_there := read_in_dram(stats):
        yield f"operators read and write {lay_there} over the link, and all times here include that: more hbm helps"
    if budget and others > CROWDED * budget:
        yield (
            f"{format_size(others)} of the budget are weights, gradients, optimizer state and the work of a layer: "
            "moving or recomputing activations frees no more than the rest"
        )
    if unforeseen := _unforeseen(plan, stats):
        yield (
            f"{format_size(unforeseen)} an iteration are moved besides what the last plan says: that is of another "
            "kind of step, or another GPU's, or tensors that it drops are of new sizes, and go to dram instead"
        )
    if not (result.ideal and result.seconds) or trace.varies:
        return
    predicted = result.seconds + streaming + streaming_state
    if measured is not None and measured > LATE * predicted:
        yield (
            f"an iteration takes {measured / predicted:.2f} times what was predicted: there were too few steps "
            "to settle, the host is slower than the device, or others use its cores or the memory bus (tiers top)"
        )
    elif measured is not None and measured * LATE < predicted:
        yield (
            f"an iteration takes {measured / predicted:.2f} times what was predicted, as the host was slow while "
            "iterations were recorded: the ideal may be too long by as much"
        )
    if result.ideal < CLOSE * predicted:
        yield from _most(result, streaming, streaming_state)


def _most(result: Simulated, streaming: float, streaming_state: float) -> Iterator[str]:
    """Say what most of the difference to the ideal is, and what would help."""
    link = "more hbm helps, or a faster link (tiers probe)"
    parts = {f"waiting for {lane}: {link}": seconds for lane, seconds in result.stalls.items()}
    parts |= {
        "waiting for weights that lie in dram: more hbm helps, or a larger batch": streaming,
        "waiting for optimizer state below hbm: more hbm helps, or a larger batch": streaming_state,
        "the host, which is busy with what moves and is recomputed: more hbm helps": waiting_for_host(result),
        "recomputing: more hbm helps, or a link that carries more (tiers probe)": result.recomputing,
    }
    if parts[most := max(parts, key=lambda part: parts[part])] > 0:
        yield f"most of the difference is {most}"


def _unforeseen(plan: Plan, stats: dict[str, Any]) -> int:
    """Bytes that leave HBM in an iteration under the last plan besides what that says; 0 if they are few."""
    if stats["step_s"].get("settled", {"steps": 0})["steps"] < ENOUGH or not stats.get("settled"):
        return 0
    moved = by_iteration(stats)[0]
    more = int(moved.get("d2h", 0.0) + moved.get("gds_write", 0.0)) - plan.moved_bytes
    return more if more > UNFORESEEN * stats["budget"]["hbm"] else 0


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
