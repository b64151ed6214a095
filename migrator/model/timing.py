"""Combines the measurements of several iterations, and removes what disturbed single ones. Pure functions.

While an iteration is recorded the host is late now and then (memory is pinned, kernels are loaded, groups are made),
and the device idles. The host is never early. So of each stretch between two positions the shortest is the truest, and
of operations that are alike, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from statistics import median
from typing import NamedTuple

from torch_tiers.allocator.sizes import MiB
from torch_tiers.migrator.model.clocks import Clocks
from torch_tiers.migrator.model.trace import Recipe, Trace

LARGE = 64 * MiB  # of an operation's result: past what caches hold, and longer than a call takes
ACCIDENT = 0.02  # of all that lies in HBM besides: with so much more of it an iteration begins by chance
SEVERAL = 3  # of a kind, of which the one in the middle tells what they take
CALL = 5e-6  # seconds between two kernels
PRODUCT = re.compile(r"\b(?:\w*mm|convolution|\w*attention\w*)\b")  # among operators


class IterationTime(NamedTuple):
    """The time of an iteration on the device, in seconds: in total, and the waits for each lane.

    Attributes
    ----------
    age : int
        Iterations that the host has finished since: it may be far ahead of the device.
    """

    seconds: float
    stalls: Mapping[str, float]
    age: int = 0


class HookTime(NamedTuple):
    """The host time of our C++ part, in seconds: of the hooks for saved tensors, by what was done with the tensor.

    Attributes
    ----------
    stays, moves, remade : float
        For tensors that stay, that move, and that are recomputed.
    groups : float
        For whole groups, within the same hooks; not part of the others.
    calls : float
        For calls of modules.
    """

    stays: float
    moves: float
    remade: float
    groups: float
    calls: float = 0.0


class HostTime(NamedTuple):
    """The host time of an iteration from its first forward on, in seconds, and the part that was our own work.

    Attributes
    ----------
    idle : bool
        Whether the device was idle as the iteration began.
    hooks : HookTime
        The hooks' part of our own work.
    """

    seconds: float
    ours: float
    idle: bool = False
    hooks: HookTime = HookTime(0.0, 0.0, 0.0, 0.0)


def product_in(name: str) -> str | None:
    """Return the first product among the operators of a name; None if there is none."""
    found = PRODUCT.search(name)
    return found and found[0]


def together(one: Trace, other: Trace) -> Trace:
    """Merge two traces of one kind of iteration; return `other` if their sites or positions differ."""
    if one.sites != other.sites or not (one.times and other.times):
        return other
    recipes = {
        ident: _quicker(recipe, one.recipes.get(ident, recipe))
        for ident, recipe in {**one.recipes, **other.recipes}.items()
    }
    others = _beside(one.others, other.others)
    held = {ident: max(end, one.held.get(ident, 0)) for ident, end in {**one.held, **other.held}.items()}
    both = replace(other, recipes=recipes, others=others, held=held)
    if one.clocks is not None and other.clocks is not None:
        return both.on(
            Clocks(
                device=tuple(map(min, one.clocks.device, other.clocks.device)),
                host=tuple(map(min, one.clocks.host, other.clocks.host)),
                joins=frozenset(one.clocks.joins) | frozenset(other.clocks.joins),
            )
        )
    *times, seconds = accumulate(map(min, _stretches(one), _stretches(other)))
    return replace(both, times=tuple(times), seconds=seconds)


def _beside(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """Return what lies in HBM besides in both of two recordings, in bytes by stretch.

    What is there in one alone is an accident, unless the iteration began with it: if gradients are accumulated, all but
    the first of a step's iterations do, and the plan is for all of them.
    """
    begins_with_more = bool(one) and abs(one[0] - other[0]) > ACCIDENT * max(*one, *other)
    return tuple(map(max if begins_with_more else min, one, other))


def _quicker(one: Recipe, other: Recipe) -> Recipe:
    return replace(one, seconds=min(one.seconds, other.seconds), host=min(one.host, other.host))


def alike(trace: Trace) -> Trace:
    """Return the trace with equal times for recipes that do the same to as many bytes.

    Recipes of one operation take no more time a byte than its quickest large one: all but products are bound by memory,
    and a short one is measured with the host's time for a call.
    """
    nbytes = {life.ident: life.nbytes for life in trace.lifetimes}

    def kind(ident: int, recipe: Recipe) -> Hashable:
        if recipe.kind:  # convolutions of other kernels may have inputs and results of the same size
            return recipe.op, recipe.kind
        # A matrix product takes as long as its inner dimension says, which its input shows.
        return recipe.op, nbytes.get(ident, 0), sum(nbytes.get(source, 0) for source in recipe.inputs)

    recipes = _by_the_byte(_shortest(trace.recipes, kind), nbytes)
    seen = replace(trace, recipes=recipes)
    return seen if trace.clocks is None else seen.on(replace(trace.clocks, host=_host_alike(trace, trace.clocks)))


def _host_alike(trace: Trace, clocks: Clocks) -> tuple[float, ...]:
    """Return the host's seconds, in no stretch more than most of its kind take, at the same place of other layers.

    A stretch is longer while it is recorded if a queue is full, or memory is mapped.
    """
    kinds: dict[int, Hashable] = {}
    for site in trace.sites:
        path, _, number = site.key.rpartition(":")
        layer = re.sub(r"\d+", "", path), number
        kinds |= {site.birth: ("saved", *layer)}
        kinds |= {use: ("used", count, *layer) for count, use in enumerate(site.uses)}
    of_kind: dict[Hashable, list[float]] = {}
    for at, kind in kinds.items():
        of_kind.setdefault(kind, []).append(clocks.host[at])
    usual = {kind: median(seconds) for kind, seconds in of_kind.items() if len(seconds) >= SEVERAL}
    return tuple(min(seconds, usual.get(kinds.get(at), math.inf)) for at, seconds in enumerate(clocks.host))


def _by_the_byte(recipes: Mapping[int, Recipe], nbytes: Mapping[int, int]) -> dict[int, Recipe]:
    """Return the recipes, none slower a byte than the quickest of its operation with a large result."""
    rates: dict[str, float] = {}
    for ident, recipe in recipes.items():
        if (size := nbytes.get(ident, 0)) >= LARGE and product_in(recipe.op) is None:
            rates[recipe.op] = min(recipe.seconds / size, rates.get(recipe.op, math.inf))
    quick = {}
    for ident, recipe in recipes.items():
        most = CALL + nbytes.get(ident, 0) * rates[recipe.op] if recipe.op in rates else math.inf
        quick[ident] = replace(recipe, seconds=min(recipe.seconds, most))
    return quick


def with_host(trace: Trace, pace: float, hooks: float, *, joins: bool) -> Trace:
    """Return the trace with the program's host times multiplied by `pace`, and with the hooks' host time.

    Parameters
    ----------
    hooks : float
        Seconds in an iteration, under any plan.
    joins : bool
        Whether the host has waited for the device as an iteration begins.
    """
    clocks = trace.clocks
    if clocks is None:
        return trace
    host = tuple(pace * seconds for seconds in clocks.host)
    all_joins = frozenset(clocks.joins) | ({0} if joins else set())
    return trace.on(replace(clocks, host=host, joins=all_joins, hooks=hooks / (trace.positions + 1)))


def at_pace(trace: Trace, pace: float) -> Trace:
    """Return the trace with all times of the device multiplied by `pace`."""
    if pace == 1.0 or not trace.times:
        return trace
    clocks = trace.clocks and replace(trace.clocks, device=tuple(pace * seconds for seconds in trace.clocks.device))
    if clocks is not None:
        trace = trace.on(clocks)
    else:
        trace = replace(trace, times=tuple(pace * at for at in trace.times), seconds=pace * trace.seconds)
    return replace(
        trace,
        recipes={ident: replace(recipe, seconds=pace * recipe.seconds) for ident, recipe in trace.recipes.items()},
    )


def _shortest(recipes: Mapping[int, Recipe], kind: Callable[[int, Recipe], Hashable]) -> dict[int, Recipe]:
    """Return the recipes, each with the shortest time of its kind."""
    best: dict[Hashable, float] = {}
    for ident, recipe in recipes.items():
        best[kind(ident, recipe)] = min(recipe.seconds, best.get(kind(ident, recipe), recipe.seconds))
    return {ident: replace(recipe, seconds=best[kind(ident, recipe)]) for ident, recipe in recipes.items()}


def _stretches(trace: Trace) -> list[float]:
    return [end - start for start, end in pairwise((0.0, *trace.times, trace.seconds))]
