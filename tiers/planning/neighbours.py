"""What did the neighbour hold? Who else had host memory when a run was short of it, or else held most of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch_tiers.allocator.holders import Holder, describe_holders
from torch_tiers.allocator.sizes import format_size


def render(stats: dict[str, Any]) -> Iterator[str]:
    """Lines for the ``host_memory`` of a stats.json; none where that does not tell, or nothing was claimed."""
    told = stats.get("host_memory") or {}
    if told.get("shortages") and (short := told["shortest"]):
        yield (
            f"host memory was short {told['shortages']} times: this program held {format_size(short['held'])} and "
            f"asked for {format_size(short['wanted'])} more, while {_others(short)}"
        )
    elif full := told.get("fullest"):
        yield f"when this program held most host memory, {format_size(full['held'] + full['wanted'])}, {_others(full)}"
    if told.get("no_room"):
        yield f"at times the system left no host memory, whoever uses it: {told['no_room']}"


def _others(held: dict[str, Any]) -> str:
    if not held["others"]:
        return "no other program with tiers held any"
    named = describe_holders(Holder(each["nbytes"], each["pid"], each["program"]) for each in held["others"])
    rest = held["by_others"] - sum(each["nbytes"] for each in held["others"])
    more = f", {format_size(rest)} by more of them" if rest > 0 else ""
    whole = "" if len(held["others"]) == 1 else f"{format_size(held['by_others'])}: "
    return f"other programs with tiers held {whole}{named}{more}"
