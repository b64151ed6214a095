"""Why a site was kept, moved or recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from torch_tiers.allocator.errors import TiersError
from torch_tiers.allocator.sizes import format_size
from torch_tiers.migrator.model.links import Links
from torch_tiers.migrator.model.trace import Site, Trace
from torch_tiers.migrator.planner.intervals import inactive
from torch_tiers.planning.compare import Candidate, Outcomes


def explain(trace: Trace, links: Links, outcomes: Outcomes, key: str) -> Iterator[str]:
    """Lines about one site: what it is, what each action would cost, and what each policy does with it.

    Raises
    ------
    TiersError
        If the trace has no such site.
    """
    site = trace.by_key.get(key)
    if site is None:
        near = get_close_matches(key, trace.by_key, n=1) or [other for other in trace.by_key if key in other]
        largest = max(trace.sites, key=lambda other: other.nbytes, default=None)
        hint = f"did you mean {near[0]}?" if near else f"its largest is {largest.key}" if largest else "it has none"
        raise TiersError(f"the trace has no site {key}: {hint}")
    yield from _facts(trace, links, site)
    for name, outcome in outcomes.items():
        if isinstance(outcome, Candidate):
            yield f"{name}: {_action(trace, outcome, site)}"


def _facts(trace: Trace, links: Links, site: Site) -> Iterator[str]:
    nbytes = trace.storage_bytes[site.storage]
    shared = sum(other.storage == site.storage for other in trace.sites) - 1
    sharing = f", shared with {shared} more" if shared else ""
    yield f"{site.key}: storage {site.storage}, {format_size(nbytes)}{sharing}"
    if not nbytes:
        yield "it cannot move, or the program itself holds it through backward: it stays, and costs nothing"
        return
    idle = [interval for interval in inactive(trace) if interval.storage == site.storage]
    if not idle:
        yield "backward never asks for it"
    elif trace.times:
        copies = nbytes / links.d2h + nbytes / links.h2d
        yield (
            f"to move: {_ms(copies)} on the lanes, there and back; it lies idle for {_ms(idle[0].seconds)} "
            f"before its first use"
        )
    recipe = trace.recipes.get(site.storage)
    if recipe is None:
        yield "to recompute: there is no recipe"
    else:
        held = ", ".join(_name(trace, ident) for ident in recipe.inputs)
        yield f"to recompute: {_ms(recipe.seconds)} by {recipe.op} from {held}: {_rate(recipe.seconds, nbytes)}"


def _action(trace: Trace, outcome: Candidate, site: Site) -> str:
    plan = outcome.plan
    if site.key in plan.recompute:
        return "recomputed by its recipe when it is first needed"
    for group, move in zip(plan.groups, outcome.result.moves, strict=True):
        if site.key in group.sites:
            where = f"moved in a group of {format_size(group.nbytes)} and {len(group.sites)} sites"
            if group.tier is not None:
                where += f" to {group.tier}"
            if not trace.times:
                return where
            out, home = f"leaves {_ms(move[0])} to {_ms(move[1])}", f"comes back {_ms(move[2])} to {_ms(move[3])}"
            return f"{where}: {out}, " + (home if move[3] else "and is still there when it is needed")
    if site.key not in plan.keep:
        return "not foreseen"
    if not (plan.groups or plan.recompute):
        return "kept, as everything is"
    return "kept: there is room for it beside what moves and what is recomputed"


def _name(trace: Trace, ident: int) -> str:
    return next((site.key for site in trace.sites if site.storage == ident), f"storage {ident}")


def _rate(seconds: float, nbytes: int) -> str:
    return f"{seconds * 1e3 / (nbytes / 2**30):.2f} ms per GiB" if nbytes else "frees nothing"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
