"""The trace: what one period saved for backward, in order. Plain data, `trace.json`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property

from allocator.lifetimes import Lifetime

FORMAT = 1


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
    """

    key: str
    storage: int
    nbytes: int
    birth: int
    uses: tuple[int, ...]


@dataclass(frozen=True)
class Trace:
    """One period: its sites in the order of their births."""

    sites: tuple[Site, ...]
    positions: int

    @cached_property
    def lifetimes(self) -> tuple[Lifetime, ...]:
        """One lifetime per storage that has bytes to move, in the order of their births."""
        born: dict[int, Site] = {}
        nbytes: dict[int, int] = {}
        uses: dict[int, list[int]] = {}
        for site in self.sites:
            born.setdefault(site.storage, site)
            nbytes[site.storage] = max(site.nbytes, nbytes.get(site.storage, 0))
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

    def to_json(self) -> str:
        """One JSON object with a format number."""
        return json.dumps({"format": FORMAT, "positions": self.positions, "sites": [asdict(s) for s in self.sites]})

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
        sites = (Site(s["key"], s["storage"], s["nbytes"], s["birth"], tuple(s["uses"])) for s in data["sites"])
        return cls(tuple(sites), data["positions"])
