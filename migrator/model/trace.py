"""The trace: what one iteration saved for backward, in order, when, and the cost of recomputing it.

Plain data, `trace.json`. A *position* counts the events of the iteration (a tensor is saved, or asked for again);
`times` and `others` hold the measurements at each position.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, TypeVar

from torch_tiers.allocator.layout.lifetimes import Lifetime
from torch_tiers.migrator.model import fields
from torch_tiers.migrator.model.clocks import Clocks, wall
from torch_tiers.migrator.model.fields import MOST_BYTES, MOST_SECONDS, BadField, finite, items, whole
from torch_tiers.migrator.model.fields import field as value_of
from torch_tiers.migrator.model.fields import text as string

FORMAT = 4
KEPT = 6  # tensors that one operation saves at most: a batch normalisation
MOST_SITES = 1 << 17  # of a trace: a recorder stops at 100,000
MOST_POSITIONS = 1 << 22  # of a trace
MOST_INPUTS = 1 << 12  # of one recipe

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Site:
    """The k-th tensor that a module saves within an iteration.

    Attributes
    ----------
    key : str
        ``module.path:k``; the same in every iteration.
    storage : int
        Number of the storage that the tensor lies on; sites on one storage share it.
    nbytes : int
        Bytes of the storage that must be kept for this tensor; 0 if moving it is impossible or frees nothing.
    birth : int
        Position at which it was saved.
    uses : tuple of int
        Positions at which backward asked for it.
    kind : str
        Class of the module that saved it, such as ``Conv2d``; empty outside of modules, or if not recorded.
    """

    key: str
    storage: int
    nbytes: int
    birth: int
    uses: tuple[int, ...]
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a storage is recomputed from others.

    Attributes
    ----------
    op : str
        The operators that made it, such as ``gelu(addmm)``, the last one first.
    inputs : tuple of int
        Storages it is recomputed from. They are saved in the same iteration; each is kept, moved or has a recipe
        itself.
    seconds : float
        The recomputation's time on the device.
    host : float
        The host's time to issue it, in seconds.
    kind : str
        Equal for recipes that run the same operators on the same shapes; empty if that is not known.
    call : int or None
        Equal for all storages that one operator returned, which are recomputed together: the first of them. None if
        that is not known.
    scratch : int
        Further bytes in use during the recomputation: intermediate results, a convolution's workspace.
    """

    op: str
    inputs: tuple[int, ...]
    seconds: float
    scratch: int = 0
    host: float = 0.0
    kind: str = ""
    call: int | None = None


@dataclass(frozen=True)
class Trace:
    """One iteration.

    Attributes
    ----------
    sites : tuple of Site
        The saved tensors, in the order of births.
    positions : int
        The number of positions.
    times : tuple of float
        Seconds from the iteration's begin until the device reaches each position; empty if not measured.
    seconds : float
        The whole iteration, the optimizer's step included; 0 if not measured.
    clocks : Clocks or None
        Each stretch's times on device and host, from which `times` and `seconds` follow; None if there is no device
        besides the host, or nothing was measured.
    others : tuple of int
        The most HBM in use between the position before and this one, in bytes, without the storages of the sites; one
        more at the end for what follows the last position. Empty if not measured. A storage is a site's from the
        position after its birth to the one after its last use, in which the gradient is computed with it; before and
        after that it counts here.
    recipes : mapping of int to Recipe
        Storages that can be recomputed.
    held : mapping of int to int
        Storages that the program itself holds for longer than until the next save, and the stretch in which it releases
        them: a block's input is held until it is added to the output. Until then they lie in HBM though no plan keeps
        them. Of storages that stay in HBM by a plan while they are recorded nothing is known.
    varies : bool
        Whether other iterations of the kind have other sizes: this is the largest, and its times hold for no other.
    """

    sites: tuple[Site, ...]
    positions: int
    times: tuple[float, ...] = ()
    seconds: float = 0.0
    others: tuple[int, ...] = ()
    recipes: Mapping[int, Recipe] = field(default_factory=dict, hash=False)
    held: Mapping[int, int] = field(default_factory=dict, hash=False)
    clocks: Clocks | None = field(default=None, hash=False)
    varies: bool = False

    def on(self, clocks: Clocks) -> Trace:
        """Return the same iteration with other clocks."""
        (*times, seconds), _ = wall(clocks)
        return replace(self, clocks=clocks, times=tuple(times), seconds=seconds)

    @cached_property
    def lead(self) -> float:
        """Return the seconds by which the host is ahead of the device as the iteration begins."""
        return 0.0 if self.clocks is None else wall(self.clocks)[1]

    @cached_property
    def lifetimes(self) -> tuple[Lifetime, ...]:
        """Return one lifetime per storage that has bytes to move, in the order of their births."""
        born: dict[int, Site] = {}
        nbytes = self.storage_bytes
        uses: dict[int, list[int]] = {}
        for site in self.sites:
            born.setdefault(site.storage, site)
            uses.setdefault(site.storage, []).extend(site.uses)
        return tuple(
            Lifetime(ident, nbytes[ident], site.birth, tuple(sorted(uses[ident])))
            for ident, site in born.items()
            if nbytes[ident]
        )

    @cached_property
    def saved_bytes(self) -> int:
        """Return the unique saved bytes of the iteration."""
        return sum(life.nbytes for life in self.lifetimes)

    def part_besides(self, other: Trace) -> float:
        """Return the part of the sites, or of the unique saved bytes if larger, that `other` does not have."""
        new = [site.storage for site in self.sites if site.key not in other.by_key]
        nbytes = sum(self.storage_bytes[ident] for ident in set(new))
        return max(len(new) / max(1, len(self.sites)), nbytes / max(1, self.saved_bytes))

    @cached_property
    def storage_bytes(self) -> Mapping[int, int]:
        """Return the bytes of every storage that a site refers to; 0 for those that cannot move."""
        nbytes: dict[int, int] = {}
        for site in self.sites:
            nbytes[site.storage] = max(site.nbytes, nbytes.get(site.storage, 0))
        return nbytes

    @cached_property
    def released_at(self) -> Mapping[int, int]:
        """Return for each storage the stretch from which on the program does not hold it any more."""
        ends = dict(self.held)
        after = ("", -1, -1)  # the next site's module, its birth, and the last save that follows it in that module
        for site in reversed(self.sites):
            # An operation saves all that it keeps before it computes, or right after, and has it until then.
            module = site.key.rpartition(":")[0]
            last = after[2] if after[:2] == (module, site.birth + 1) else site.birth
            after = (module, site.birth, last)
            # But not all that follows in one module is of one operation.
            ends[site.storage] = max(min(last, site.birth + KEPT - 1) + 2, ends.get(site.storage, 0))
        return ends

    @cached_property
    def turn(self) -> int:
        """Return the position of the last save before backward asks for anything."""
        first_use = min((site.uses[0] for site in self.sites if site.uses), default=self.positions)
        return max((site.birth for site in self.sites if site.birth < first_use), default=0)

    @cached_property
    def by_key(self) -> Mapping[str, Site]:
        """Return the sites by their keys."""
        return {site.key: site for site in self.sites}

    def to_json(self) -> str:
        """Return one JSON object with a format number."""
        data = {
            "format": FORMAT,
            "positions": self.positions,
            "seconds": self.seconds,
            "sites": [asdict(site) for site in self.sites],
            "times": self.times,
            "others": self.others,
            "recipes": {ident: asdict(recipe) for ident, recipe in self.recipes.items()},
            "held": self.held,
            "varies": self.varies,
            "clocks": None if self.clocks is None else _clocks_to_json(self.clocks),
        }
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """Read and validate what `to_json` wrote.

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
        trace = cls(
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


_ident = partial(whole, low=-MOST_BYTES)  # storages that are not told apart have numbers below zero


def _time(value: object, where: str) -> float:
    return finite(value, where, -MOST_SECONDS)  # from one stream to another: clocks of events are not exact


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
    fields.no_others(said, tuple(each.name for each in dataclasses.fields(kind)), where)
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
    for name, found, wanted in (
        ("times", len(trace.times), trace.positions),
        ("others", len(trace.others), trace.positions + 1),
        *(() if trace.clocks is None else _of_each_stretch(trace.clocks, trace.positions)),
    ):
        if found not in (0, wanted):
            raise BadField(name, f"has {found} items, and not one for each of {wanted}")


def _of_each_stretch(clocks: Clocks, positions: int) -> Iterator[tuple[str, int, int]]:
    yield "clocks.device", len(clocks.device), positions + 1
    yield "clocks.host", len(clocks.host), positions + 1


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
