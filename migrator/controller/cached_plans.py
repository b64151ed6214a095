"""The plans, traces and corrections of one run of a program, for its next run to begin with. Pure.

Two runs are of the same program if they save as many bytes at the same sites, in the same order, and as much lies in
HBM between two iterations, such as an optimizer's state. They have the same plan if links and the tiers below are
alike. Whether a tensor can be recomputed is not cached: each run verifies that the bits are the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol

import xxhash

from torch_tiers.migrator.controller.corrections import Corrections
from torch_tiers.migrator.model import trace_json
from torch_tiers.migrator.model.fields import field as value_of
from torch_tiers.migrator.model.fields import finite, items, mapping, parse, record, text, whole
from torch_tiers.migrator.model.links import BOUNDLESS, LANES, WORSE, Calls, Links
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.trace import Site, Trace
from torch_tiers.migrator.planner.match import check_match

FORMAT = 4
KINDS = 8  # of iterations, at most


@dataclass(frozen=True, slots=True)
class CachedPlans:
    """A plan for each kind of iteration, with its trace as recorded, and the corrections since.

    Attributes
    ----------
    links : Links
        The assumed bandwidths, before any correction.
    static : int
        Bytes in use between two iterations.
    streamed : int
        Bytes that HBM lacked, for which frozen weights are streamed; 0 if none are.
    state : int
        Bytes of optimizer state that were demoted for these plans.
    """

    traces: tuple[Trace, ...]
    plans: tuple[Plan, ...]
    corrections: Corrections
    links: Links
    static: int
    streamed: int = 0
    state: int = 0

    def holds_for(self, links: Links, static: int, tolerance: int) -> bool:
        """Return whether they apply to these links, with `static` bytes in use within the `tolerance`."""
        if abs(static - self.static) > tolerance or any(
            abs(getattr(links, lane) - getattr(self.links, lane)) > WORSE * getattr(self.links, lane) for lane in LANES
        ):
            return False
        if not links.has_drive and any(group.tier == "nvme" for plan in self.plans for group in plan.groups):
            return False
        # Tiers that hold all that could move are alike, however large they are.
        ample = max(trace.saved_bytes for trace in self.traces)
        now, then = ((min(of.below, ample), min(of.dram, ample)) for of in (links, self.links))
        return now == then

    def to_json(self) -> str:
        """Return one JSON object."""
        data = {
            "format": FORMAT,
            "traces": [trace_json.write(trace) for trace in self.traces],
            "plans": [plan.to_json() for plan in self.plans],
            "corrections": asdict(self.corrections),
            "links": {lane: getattr(self.links, lane) for lane in LANES},
            "below": [self.links.below, self.links.dram],
            "static": self.static,
            "streamed": self.streamed,
            "state": self.state,
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
        traces = items(value_of(data, "traces"), "traces", lambda one, at: trace_json.read(text(one, at)), KINDS)
        plans = items(value_of(data, "plans"), "plans", lambda one, at: Plan.from_json(text(one, at)), KINDS)
        if not traces or len(traces) != len(plans):
            raise ValueError("it has not one plan for each trace")
        for trace, plan in zip(traces, plans, strict=True):
            check_match(plan, trace)
            if not plan.keep.keys() <= trace.by_key.keys():
                raise ValueError("a plan keeps sites that its trace has not")
        corrections = _corrections(value_of(data, "corrections"))
        numbers = (whole(value_of(data, name), name) for name in ("static", "streamed", "state"))
        return cls(traces, plans, corrections, _links(data), *numbers)


class PlanCache(Protocol):
    """Keeps plans from one run of a program to the next."""

    def find(self, sites: Sequence[Site]) -> CachedPlans | None:
        """Return the plans of a program that has such an iteration; None if there are none."""

    def store(self, plans: CachedPlans) -> None:
        """Keep plans for programs that have any of their iterations."""


def fingerprint(sites: Sequence[Site], *context: object) -> str:
    """Return a hash of the sites of an iteration, and of the machine and budget that `context` names."""
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
