"""The corrections of bandwidths and host costs in `stats.json`, which reports and plans of that run use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from torch_tiers.migrator.controller.corrections import Corrections
from torch_tiers.migrator.model.fields import BadField, field, finite, mapping, record
from torch_tiers.migrator.model.links import LANES, Calls, Links

LEAST = 1e-6  # of a bandwidth: a lane that gives nothing is none


def to_json(corrections: Corrections) -> dict[str, dict[str, float]]:
    """The parts of their bandwidths that lanes give, and what a plan's parts cost the host, in seconds."""
    return {"links": dict(corrections.parts), "calls": asdict(corrections.calls)}


def check(value: object) -> None:
    """Check what `to_json` writes.

    Raises
    ------
    BadField
        If it is anything else.
    """
    told = record(value, "corrections")
    part = partial(finite, low=LEAST, high=1.0)
    parts = mapping(field(told, "links", "corrections"), "corrections.links", part, len(LANES))
    calls = mapping(field(told, "calls", "corrections"), "corrections.calls", finite, len(Calls.__slots__))
    if unknown := parts.keys() - set(LANES):
        raise BadField("corrections.links", f"names {min(unknown)}, and there is no such lane")
    if calls.keys() != set(Calls.__slots__):
        raise BadField("corrections.calls", f"has not each of {', '.join(Calls.__slots__)}")


def corrected(links: Links, stats: Mapping[str, Any]) -> Links:
    """Return links as the run that left these numbers knows them."""
    corrections = stats.get("corrections")
    if not corrections:  # there was no plan, or an earlier version did not tell
        return links
    return links.scaled(corrections["links"]).with_calls(Calls(**corrections["calls"]))
