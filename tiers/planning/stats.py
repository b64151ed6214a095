"""The numbers of a run, `stats.json`, checked as they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch_tiers.migrator.model.fields import MOST_SECONDS, field, finite, items, mapping, parse, record, text, whole
from torch_tiers.planning import corrections

_MOST_COUNTED = 1 << 63  # of what is counted: bytes moved in a year, and more
_MOST_NAMES = 256  # lanes, causes of stalls, tiers
_CHANGES = 1 << 16  # that the monitor tells of

_count = partial(whole, high=_MOST_COUNTED)
_seconds = partial(finite, high=MOST_SECONDS)

Check = Callable[[Any, str], object]


def stats_from_json(content: str) -> dict[str, Any]:
    """Read the numbers of a run; those of earlier versions lack some, which nobody may take for granted.

    Raises
    ------
    ValueError
        If the text is no JSON, or a `BadField` if it says what no run writes.
    """
    stats = record(parse(content), "stats")
    for name in ("device", "allocator", "policy"):
        text(field(stats, name), name)
    for name in ("steps", "iterations", "groups", "unmanaged_bytes"):
        _count(field(stats, name), name)
    _check_tiers(stats)
    lanes = mapping(field(stats, "moved"), "moved", _count, _MOST_NAMES)
    causes = mapping(field(stats, "stalls"), "stalls", _stall, _MOST_NAMES)
    _check_steps(record(field(stats, "step_s"), "step_s"))
    _check_settled(stats, {"moved": lanes.keys(), "stalled_s": causes.keys()})
    if stats.get("budget_share") is not None:  # of which earlier versions did not tell
        text(stats["budget_share"], "budget_share")
    for name in (
        "flushes",
        "bounced",
        "demoted",
        "state_in_dram",
        "state_in_place",
        "state_on_nvme",
        "overflow",
    ):  # of which earlier versions did not tell
        if name in stats:
            _count(stats[name], name)
    if stats.get("worn") is not None:  # of those that wrote to a drive
        worn = record(stats["worn"], "worn")
        _check_counts(worn, "worn", ("drives", "processes"))
        for drive in mapping(field(worn, "told", "worn"), "worn.told", record, _MOST_NAMES).values():
            _check_counts(drive, "worn.told", ("percent", "written"))
    if stats.get("host_memory") is not None:  # of which earlier versions did not tell
        _check_host_memory(record(stats["host_memory"], "host_memory"))
    if stats.get("corrections") is not None:  # nor of these
        corrections.check(stats["corrections"])
    if stats.get("pages") is not None:
        names = ("planned", "mispredicted", "misplaced", "maps", "unmaps", "waits", "dram")
        _check_counts(record(stats["pages"], "pages"), "pages", names)
    if field(stats, "monitor") is not None:
        monitor = record(stats["monitor"], "monitor")
        _check_counts(monitor, "monitor", ("backed_off", "steps"))
        items(field(monitor, "changes", "monitor"), "monitor.changes", text, _CHANGES)
    return dict(stats)


def _check_host_memory(told: Mapping[str, Any]) -> None:
    _check_counts(told, "host_memory", ("shortages",))
    text(field(told, "no_room", "host_memory"), "host_memory.no_room")
    for name in ("shortest", "fullest"):
        if field(told, name, "host_memory") is not None:
            where = f"host_memory.{name}"
            held = record(told[name], where)
            _check_counts(held, where, ("wanted", "held", "by_others"))
            items(field(held, "others", where), f"{where}.others", _holder, _MOST_NAMES)


def _holder(value: object, where: str) -> None:
    holder = record(value, where)
    _check_counts(holder, where, ("nbytes", "pid"))
    text(field(holder, "program", where), f"{where}.program")


def _check_tiers(stats: Mapping[str, Any]) -> None:
    peak = mapping(field(stats, "peak"), "peak", _count, _MOST_NAMES)
    budget = mapping(field(stats, "budget"), "budget", _or_none(_count), _MOST_NAMES)
    for tier in ("hbm", *peak):
        field(budget, tier, "budget")
    field(peak, "hbm", "peak")
    field(budget, "nvme", "budget")
    _count(budget["hbm"], "budget.hbm")


def _check_steps(step: Mapping[str, Any]) -> None:
    for name in ("median", "min", "max"):
        _or_none(_seconds)(field(step, name, "step_s"), f"step_s.{name}")
    if "settled" in step:
        settled = record(step["settled"], "step_s.settled")
        _or_none(_seconds)(field(settled, "median", "step_s.settled"), "step_s.settled.median")
        for name in ("low", "high"):
            if name in settled:  # of which earlier versions did not tell
                _or_none(_seconds)(settled[name], f"step_s.settled.{name}")
        _check_counts(settled, "step_s.settled", ("steps",))


def _check_settled(stats: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """What is told of the iterations under the last plan is told of the same lanes and causes."""
    if stats.get("settled") is None:
        return
    settled = record(stats["settled"], "settled")
    field(record(stats["step_s"], "step_s"), "settled", "step_s")
    _check_counts(settled, "settled", ("iterations", *(["flushes"] if "flushes" in settled else [])))
    for name, read in (("moved", _count), ("stalled_s", _seconds)):
        counts = mapping(field(settled, name, "settled"), f"settled.{name}", read, _MOST_NAMES)
        for key in wanted[name]:
            field(counts, key, f"settled.{name}")


def _stall(value: object, where: str) -> None:
    stall = record(value, where)
    _check_counts(stall, where, ("count",))
    _seconds(field(stall, "seconds", where), f"{where}.seconds")


def _check_counts(of: Mapping[str, Any], where: str, names: tuple[str, ...]) -> None:
    for name in names:
        _count(field(of, name, where), f"{where}.{name}")


def _or_none(check: Check) -> Check:
    return lambda value, where: None if value is None else check(value, where)
