"""The trace: what one period saved for backward, in order, when, and what it would cost to recompute it.

Plain data, `trace.json`. A *position* counts the events of the period (a tensor saved, a tensor asked
for again); `times` and `others` tell what was measured at each.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from torch_tiers.allocator.lifetimes import Lifetime

FORMAT = 2
KEPT = 6  # tensors that one operation saves at most: a batch normalisation


@dataclass(frozen=True, slots=True)
class Site:
    """The k-th tensor a module saves within a period.

    Attributes
    ----------
    key : str
        ``module.path:k``; the same in every period.
    storage : int
        Which storage the tensor lies on; sites that share a storage share the number.
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
    """How a storage is recomputed from others: light recomputation.

    Attributes
    ----------
    op : str
        Name of the operation that made it, such as ``GeluBackward0``.
    inputs : tuple of int
        Storages it is made from. They are saved in the same period; each is kept, moved or has a recipe itself.
    seconds : float
        What recomputing it takes on the device.
    scratch : int
        Bytes that are in use besides while it is recomputed: results in between, a convolution's workspace.
    held : tuple of int
        Of the inputs, those that are known to have been in HBM when it was saved, as the operation that saved it was
        given them: as they are, or to be added up.
    """

    op: str
    inputs: tuple[int, ...]
    seconds: float
    scratch: int = 0
    held: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Region:
    """A module that may be recomputed as a whole, from its saved inputs.

    Attributes
    ----------
    path : str
        The module's path.
    begin, end : int
        Its forward saved the sites born in positions ``[begin, end)``.
    inputs : tuple of int
        Storages that a checkpoint of it would save.
    input_bytes : int
        Bytes of those.
    seconds : float
        What its forward takes on the device, up to its last save: recomputing stops there.
    """

    path: str
    begin: int
    end: int
    inputs: tuple[int, ...]
    input_bytes: int
    seconds: float


@dataclass(frozen=True)
class Trace:
    """One period.

    Attributes
    ----------
    sites : tuple of Site
        What was saved, in the order of births.
    positions : int
        How many positions the period has.
    times : tuple of float
        Seconds on the device from the period's begin to each position; empty if not measured.
    seconds : float
        The whole period, the optimizer's step included; 0 if not measured.
    others : tuple of int
        The most HBM in use between the position before and this one, in bytes, without the storages of
        the sites; one more at the end for what follows the last position. Empty if not measured. A storage
        is a site's from the position after its birth to the one after its last use, in which the gradient is
        computed with it; before and after that it counts here.
    recipes : mapping of int to Recipe
        Storages that can be recomputed cheaply.
    regions : tuple of Region
        Modules that can be recomputed as a whole; they may nest.
    held : mapping of int to int
        Storages that the program itself holds for longer than until the next save, and the stretch in which it does
        no more: a block's input until it is added to the output. Until then they lie in HBM though nobody keeps them.
        Of what stays in HBM by a plan that is recorded nothing is known but what recipes tell.
    """

    sites: tuple[Site, ...]
    positions: int
    times: tuple[float, ...] = ()
    seconds: float = 0.0
    others: tuple[int, ...] = ()
    recipes: Mapping[int, Recipe] = field(default_factory=dict, hash=False)
    regions: tuple[Region, ...] = ()
    held: Mapping[int, int] = field(default_factory=dict, hash=False)

    @cached_property
    def lifetimes(self) -> tuple[Lifetime, ...]:
        """One lifetime per storage that has bytes to move, in the order of their births."""
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
        """Unique saved bytes of the period."""
        return sum(life.nbytes for life in self.lifetimes)

    @cached_property
    def storage_bytes(self) -> Mapping[int, int]:
        """Bytes of every storage that a site refers to; 0 for those that cannot move."""
        nbytes: dict[int, int] = {}
        for site in self.sites:
            nbytes[site.storage] = max(site.nbytes, nbytes.get(site.storage, 0))
        return nbytes

    @cached_property
    def let_go(self) -> Mapping[int, int]:
        """By storage, the stretch from which on it lies in HBM only if somebody keeps it, as the program does not."""
        ends = dict(self.held)
        after = ("", -1, -1)  # the next site's module, its birth, and the last save that follows it in that module
        for site in reversed(self.sites):
            # An operation saves all that it keeps before it computes, or right after, and has it until then.
            module = site.key.rpartition(":")[0]
            last = after[2] if after[:2] == (module, site.birth + 1) else site.birth
            after = (module, site.birth, last)
            # But not all that follows in one module is of one operation.
            ends[site.storage] = max(min(last, site.birth + KEPT - 1) + 2, ends.get(site.storage, 0))
        for life in self.lifetimes:
            if life.ident in self.recipes:
                for source in self.recipes[life.ident].held:
                    ends[source] = max(life.birth + 1, ends.get(source, 0))
        return ends

    @cached_property
    def turn(self) -> int:
        """Position of the last save before backward asks for anything."""
        first_use = min((site.uses[0] for site in self.sites if site.uses), default=self.positions)
        return max((site.birth for site in self.sites if site.birth < first_use), default=0)

    @cached_property
    def by_key(self) -> Mapping[str, Site]:
        """The sites by their keys."""
        return {site.key: site for site in self.sites}

    @cached_property
    def _births(self) -> tuple[int, ...]:
        return tuple(site.birth for site in self.sites)

    def sites_of(self, region: Region) -> tuple[Site, ...]:
        """The sites that the forward of `region` saved."""
        return self.sites[bisect_left(self._births, region.begin) : bisect_left(self._births, region.end)]

    def input_bytes(self, region: Region) -> list[tuple[int, int]]:
        """Inputs of `region` with their bytes; those that no site refers to share what is left of the sum."""
        known = self.storage_bytes
        unknown = [ident for ident in region.inputs if ident not in known]
        left = max(0, region.input_bytes - sum(known.get(ident, 0) for ident in region.inputs))
        return [(ident, known[ident] if ident in known else left // len(unknown)) for ident in region.inputs]

    def to_json(self) -> str:
        """One JSON object with a format number."""
        data = {
            "format": FORMAT,
            "positions": self.positions,
            "seconds": self.seconds,
            "sites": [asdict(site) for site in self.sites],
            "times": self.times,
            "others": self.others,
            "recipes": {ident: asdict(recipe) for ident, recipe in self.recipes.items()},
            "regions": [asdict(region) for region in self.regions],
            "held": self.held,
        }
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """Read what `to_json` wrote.

        Raises
        ------
        ValueError
            If the text is of another format.
        """
        data = json.loads(text)
        found = data.get("format") if isinstance(data, dict) else None
        if found != FORMAT:
            raise ValueError(f"trace format {found!r} is not {FORMAT}: record it again with this version")
        return cls(
            sites=tuple(Site(**site | {"uses": tuple(site["uses"])}) for site in data["sites"]),
            positions=data["positions"],
            times=tuple(data["times"]),
            seconds=data["seconds"],
            others=tuple(data["others"]),
            recipes={int(i): _recipe(**recipe) for i, recipe in data["recipes"].items()},
            regions=tuple(Region(**region | {"inputs": tuple(region["inputs"])}) for region in data["regions"]),
            held={int(i): end for i, end in data.get("held", {}).items()},
        )


def _recipe(*, inputs: list[int], held: Sequence[int] = (), **others: Any) -> Recipe:
    """One that was written, perhaps before it told what was held."""
    return Recipe(inputs=tuple(inputs), held=tuple(held), **others)


def checkpoint_key(path: str, number: int) -> str:
    """Key of the site that holds input `number` of the region `path` while it is recomputed as a whole.

    Inputs are counted through the period: a module that is called twice goes on counting.
    """
    return f"{path}/in:{number}"
