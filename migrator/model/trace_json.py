"""Reads and writes `trace.json`. What no run writes is refused by the name of its field."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from dataclasses import fields as fields_of
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

from torch_tiers.migrator.model import fields
from torch_tiers.migrator.model.clocks import Clocks
from torch_tiers.migrator.model.fields import BadField, finite, items, whole
from torch_tiers.migrator.model.fields import field as value_of
from torch_tiers.migrator.model.fields import text as string
from torch_tiers.migrator.model.trace import MOST_POSITIONS, MOST_SITES, Recipe, Site, Trace

FORMAT = 4
MOST_INPUTS = 1 << 12  # of one recipe

Item = TypeVar("Item")


def write(trace: Trace) -> str:
    """Return one JSON object with a format number."""
    data = {
        "format": FORMAT,
        "positions": trace.positions,
        "seconds": trace.seconds,
        "sites": [asdict(site) for site in trace.sites],
        "times": trace.times,
        "others": trace.others,
        "recipes": {ident: asdict(recipe) for ident, recipe in trace.recipes.items()},
        "held": trace.held,
        "varies": trace.varies,
        "clocks": None if trace.clocks is None else _clocks_to_json(trace.clocks),
    }
    return json.dumps(data)


def read(text: str) -> Trace:
    """Read and validate what `write` wrote.

    Raises
    ------
    ValueError
        If the text is of another format, or a `BadField` if it holds what no run writes.
    """
    data = fields.parse(text)
    found = data.get("format") if isinstance(data, dict) else None
    if type(found) is not int or found != FORMAT:
        shown = repr(found) if isinstance(found, int) and abs(found) < MOST_POSITIONS else "of another kind"
        raise ValueError(f"trace format {shown} is not {FORMAT}: record it again with this version")
    positions = whole(value_of(data, "positions"), "positions", 0, MOST_POSITIONS)
    trace = Trace(
        sites=items(value_of(data, "sites"), "sites", partial(_site, positions=positions), MOST_SITES),
        positions=positions,
        times=items(value_of(data, "times"), "times", _time, MOST_POSITIONS),
        seconds=finite(value_of(data, "seconds"), "seconds"),
        others=items(value_of(data, "others"), "others", whole, MOST_POSITIONS + 1),
        recipes=_by_storage(value_of(data, "recipes"), "recipes", _recipe),
        held=_by_storage(data.get("held", {}), "held", partial(whole, high=positions + 1)),
        clocks=_clocks(value_of(data, "clocks"), positions),
        varies=data.get("varies") is True,  # of which earlier versions did not tell
    )
    _check_order(trace)
    _check_measures(trace)
    _check_storages(trace)
    return trace


def _clocks_to_json(clocks: Clocks) -> dict[str, object]:
    joins = sorted(clocks.joins)
    return {"device": list(clocks.device), "host": list(clocks.host), "joins": joins, "hooks": clocks.hooks}


def _clocks(value: object, positions: int) -> Clocks | None:
    if value is None:
        return None
    said = fields.record(value, "clocks")
    fields.no_others(said, ("device", "host", "joins", "hooks"), "clocks")
    device = items(value_of(said, "device", "clocks"), "clocks.device", finite, positions + 1)
    host = items(value_of(said, "host", "clocks"), "clocks.host", finite, positions + 1)
    joins = items(value_of(said, "joins", "clocks"), "clocks.joins", partial(whole, high=positions), positions + 1)
    return Clocks(device, host, frozenset(joins), finite(value_of(said, "hooks", "clocks"), "clocks.hooks"))


_ident = partial(whole, low=-fields.MOST_BYTES)  # storages that are not told apart have numbers below zero


def _time(value: object, where: str) -> float:
    return finite(value, where, -fields.MOST_SECONDS)  # from one stream to another: clocks of events are not exact


def _site(value: object, where: str, positions: int) -> Site:
    said = _fields_of(Site, value, where)
    at = partial(whole, high=positions - 1)
    return Site(
        key=string(value_of(said, "key", where), f"{where}.key"),
        storage=_ident(value_of(said, "storage", where), f"{where}.storage"),
        nbytes=whole(value_of(said, "nbytes", where), f"{where}.nbytes"),
        birth=at(value_of(said, "birth", where), f"{where}.birth"),
        uses=items(value_of(said, "uses", where), f"{where}.uses", at, positions),
        kind=string(said.get("kind", ""), f"{where}.kind"),
    )


def _recipe(value: object, where: str) -> Recipe:
    said = _fields_of(Recipe, value, where)
    return Recipe(
        op=string(value_of(said, "op", where), f"{where}.op"),
        inputs=items(value_of(said, "inputs", where), f"{where}.inputs", _ident, MOST_INPUTS),
        seconds=finite(value_of(said, "seconds", where), f"{where}.seconds"),
        scratch=whole(said.get("scratch", 0), f"{where}.scratch"),
        host=finite(said.get("host", 0.0), f"{where}.host"),
        kind=string(said.get("kind", ""), f"{where}.kind"),
        call=None if said.get("call") is None else _ident(said["call"], f"{where}.call"),
    )


def _fields_of(kind: type[Site | Recipe], value: object, where: str) -> Mapping[str, Any]:
    said = fields.record(value, where)
    fields.no_others(said, tuple(each.name for each in fields_of(kind)), where)
    return said


def _by_storage(value: object, where: str, read: Callable[[Any, str], Item]) -> dict[int, Item]:
    named = fields.mapping(value, where, read, MOST_SITES)
    numbered = {fields.number_of(name, where): item for name, item in named.items()}
    if len(numbered) < len(named):  # "1" and "01"
        raise BadField(where, "has two entries for one storage")
    return numbered


def _check_order(trace: Trace) -> None:
    """Check that sites come in the order of births, with unique keys, and are used after that."""
    events, keys, before = len(trace.sites), set[str](), -1
    for number, site in enumerate(trace.sites):
        where = f"sites[{number}]"
        if site.key in keys:
            raise BadField(f"{where}.key", "is that of a site before")
        if site.birth <= before:
            raise BadField(f"{where}.birth", "is not after that of the site before")
        if any(use <= last for last, use in pairwise((site.birth, *site.uses))):
            raise BadField(f"{where}.uses", "are not one after the other, and after its birth")
        keys.add(site.key)
        before, events = site.birth, events + len(site.uses)
    if trace.positions > events:  # for each there is memory to be taken, whatever the file's size
        raise BadField("positions", f"is {trace.positions}, where no more than {events} things happen")


def _check_measures(trace: Trace) -> None:
    """Check that each measurement has one item for every position."""
    stretches = trace.positions + 1
    measured: list[tuple[str, Sequence[object], int]] = [
        ("times", trace.times, trace.positions),
        ("others", trace.others, stretches),
    ]
    if (clocks := trace.clocks) is not None:
        measured += [("clocks.device", clocks.device, stretches), ("clocks.host", clocks.host, stretches)]
    for name, found, wanted in measured:
        if len(found) not in (0, wanted):
            raise BadField(name, f"has {len(found)} items, and not one for each of {wanted}")


def _check_storages(trace: Trace) -> None:
    """Check that recipes and `held` refer to storages that are saved."""
    known = trace.storage_bytes
    for ident, recipe in trace.recipes.items():
        where = f"recipes['{ident}']"
        if ident not in known:
            raise BadField(where, "is of a storage that no site has")
        if not known.keys() >= set(recipe.inputs):
            raise BadField(f"{where}.inputs", "names a storage that no site has")
    for ident in trace.held:
        if ident not in known:
            raise BadField(f"held['{ident}']", "is of a storage that no site has")
    _check_recipes_end(trace.recipes)
    inputs: dict[int, tuple[int, ...]] = {}
    for ident, recipe in trace.recipes.items():
        if recipe.call is not None and inputs.setdefault(recipe.call, recipe.inputs) != recipe.inputs:
            raise BadField(f"recipes['{ident}'].inputs", "are not those of the others of its call")


def _check_recipes_end(recipes: Mapping[int, Recipe]) -> None:
    """Check that no storage is recomputed from itself, directly or not."""
    left = {ident: sum(source in recipes for source in set(recipe.inputs)) for ident, recipe in recipes.items()}
    needed_for: dict[int, list[int]] = {}
    for ident, recipe in recipes.items():
        for source in set(recipe.inputs):
            needed_for.setdefault(source, []).append(ident)
    ends = [ident for ident, count in left.items() if not count]
    while ends:
        source = ends.pop()
        del left[source]
        for ident in needed_for.get(source, ()):
            left[ident] -= 1
            if not left[ident]:
                ends.append(ident)
    if left:
        raise BadField(f"recipes['{min(left)}'].inputs", "make it from itself")
