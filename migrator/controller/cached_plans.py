"""What was learned of a program, for the next run of it to begin with. Pure.

Two runs are of the same program if they save as many bytes at the same sites, in the same order, and as much lies in
HBM between two iterations, such as an optimizer's state. They have the same plan where links and the tiers below are
alike. What can be recomputed is none of it: each run sees for itself whether the bits are the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Protocol

import xxhash

from torch_tiers.migrator.model.fields import field as value_of
from torch_tiers.migrator.model.fields import finite, items, mapping, parse, record, text, whole
from torch_tiers.migrator.model.links import BOUNDLESS, LANES, WORSE, Calls, Links
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.trace import Site, Trace
from torch_tiers.migrator.planner.match import check_match

FORMAT = 2
KINDS = 8  # of iterations, at most


@dataclass(frozen=True, slots=True)
class Corrections:
    """What was found of recorded times, of the budget and of the links; see `Feedback`.

    Attributes
    ----------
    budget : int
        What is added to it, in bytes.
    pace, host_pace : float
        What the program's times on the device, and those of the host, are multiplied by.
    hooks : float
        Seconds that hooks keep the host in an iteration, under any plan.
    issuing : float
        Seconds of the host's for the program, as they were recorded.
    joins : bool
        Whether the host waits for the device between two iterations.
    calls : Calls
        What a plan costs the host.
    parts : dict
        Of what the links are taken to give, by lane: what is left of it.
    """

    budget: int = 0
    pace: float = 1.0
    host_pace: float = 1.0
    hooks: float = 0.0
    issuing: float = 0.0
    joins: bool = False
    calls: Calls = field(default_factory=Calls)
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CachedPlans:
    """A plan for each kind of iteration, the trace that it is for, as it was recorded, and what was found since.

    Attributes
    ----------
    links : Links
        What the lanes were taken to give, before any correction.
    static : int
        Bytes in use between two iterations.
    """

    traces: tuple[Trace, ...]
    plans: tuple[Plan, ...]
    corrections: Corrections
    links: Links
    static: int

    def holds_for(self, links: Links, static: int, tolerance: int) -> bool:
        """Whether it can be begun with where there are these links, and `static` bytes within the `tolerance`."""
        if abs(static - self.static) > tolerance or any(
            abs(getattr(links, lane) - getattr(self.links, lane)) > WORSE * getattr(self.links, lane) for lane in LANES
        ):
            return False
        # Tiers that hold all that could move are alike, however large they are.
        ample = max(trace.saved_bytes for trace in self.traces)
        now, then = ((min(of.below, ample), min(of.dram, ample)) for of in (links, self.links))
        return now == then

    def to_json(self) -> str:
        """One JSON object."""
        data = {
            "format": FORMAT,
            "traces": [trace.to_json() for trace in self.traces],
            "plans": [plan.to_json() for plan in self.plans],
            "corrections": asdict(self.corrections),
            "links": {lane: getattr(self.links, lane) for lane in LANES},
            "below": [self.links.below, self.links.dram],
            "static": self.static,
        }
        return json.dumps(data)

    @classmethod
    def from_json(cls, content: str) -> CachedPlans:
        """Read what `to_json` wrote.

        Raises
        ------
        ValueError
            If it is something else, or of another version.
        """
        data = record(parse(content), "cached plans")
        if value_of(data, "format") != FORMAT:
            raise ValueError("it is of another version")
        traces = items(value_of(data, "traces"), "traces", lambda one, at: Trace.from_json(text(one, at)), KINDS)
        plans = items(value_of(data, "plans"), "plans", lambda one, at: Plan.from_json(text(one, at)), KINDS)
        if not traces or len(traces) != len(plans):
            raise ValueError("it has not one plan for each trace")
        for trace, plan in zip(traces, plans, strict=True):
            check_match(plan, trace)
            if not plan.keep.keys() <= trace.by_key.keys():
                raise ValueError("a plan keeps sites that its trace has not")
        corrections = _corrections(value_of(data, "corrections"))
        return cls(traces, plans, corrections, _links(data), whole(value_of(data, "static"), "static"))


class PlanCache(Protocol):
    """Keeps what was learned from one run of a program to the next."""

    def find(self, sites: Sequence[Site]) -> CachedPlans | None:
        """What was kept of a program that has such an iteration."""

    def store(self, plans: CachedPlans) -> None:
        """Keep it, for programs that have any of its iterations."""


def fingerprint(sites: Sequence[Site], *context: object) -> str:
    """Tells a program by the sites of one of its iterations, on a machine and with a budget that `context` tells."""
    told = xxhash.xxh3_128()
    for one in context:
        told.update(f"{one!r}\n".encode())
    for site in sites:
        told.update(f"{site.key} {site.nbytes} {site.kind}\n".encode())
    return told.hexdigest()


def _links(data: Mapping[str, Any]) -> Links:
    lanes = record(value_of(data, "links"), "links")
    rates: dict[str, Any] = {lane: finite(value_of(lanes, lane), lane, high=1e15) for lane in LANES}
    below = items(value_of(data, "below"), "below", partial(whole, high=BOUNDLESS), 2)
    if len(below) < 2:
        raise ValueError("it does not tell what the tiers hold")
    return Links(both=rates["d2h"] + rates["h2d"], below=below[0], dram=below[1], **rates)


def _corrections(value: object) -> Corrections:
    said = record(value, "corrections")

    def number(name: str) -> float:
        return finite(value_of(said, name), name)

    calls = record(value_of(said, "calls"), "calls")
    parts: dict[str, Any] = mapping(value_of(said, "parts"), "parts", finite, len(LANES))
    if not parts.keys() <= set(LANES):
        raise ValueError("there is no such lane")
    return Corrections(
        budget=whole(value_of(said, "budget"), "budget", -(1 << 60), 1 << 60),
        **{name: number(name) for name in ("pace", "host_pace", "hooks", "issuing")},
        joins=value_of(said, "joins") is True,
        calls=Calls(**{name: finite(value_of(calls, name), name) for name in ("group", "moved", "remade")}),
        parts=parts,
    )
