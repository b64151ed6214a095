"""The trace: what one iteration saved for backward, in order, when, and the cost of recomputing it.

Plain data; `trace_json` reads and writes it. A *position* counts the events of the iteration (a tensor is saved, or
asked for again); `times` and `others` hold the measurements at each position.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch_tiers.allocator.layout.lifetimes import Lifetime
from torch_tiers.migrator.model.clocks import Clocks, wall

KEPT = 6  # tensors that one operation saves at most: a batch normalisation
MOST_SITES = 1 << 17  # of a trace: a recorder stops at 100,000
MOST_POSITIONS = 1 << 22  # of a trace


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

    def without_state(self, nbytes: int) -> Trace:
        """Return the trace with `nbytes` less in HBM beside saved tensors, in every stretch."""
        return replace(self, others=tuple(max(0, other - nbytes) for other in self.others))

    def without(self, keys: Collection[str]) -> Trace:
        """Return the same iteration, in which nothing is recomputed that was saved at these sites."""
        idents = {site.storage for site in self.sites if site.key in keys}
        if idents.isdisjoint(self.recipes):
            return self
        return replace(self, recipes={ident: how for ident, how in self.recipes.items() if ident not in idents})

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
