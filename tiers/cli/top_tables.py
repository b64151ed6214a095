"""What ``tiers top`` shows of programs: what they have in use, how fast they are, and what their monitors see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from torch_tiers.allocator.holders import Holder, describe_holders
from torch_tiers.allocator.sizes import GiB, format_size
from torch_tiers.migrator.telemetry.now import Now
from torch_tiers.monitor.verdict import said
from torch_tiers.planning.answer import Answer

TIERS = ("hbm", "dram", "nvme")
_NOBODY = "no program of this user is running with tiers and its monitor"
_UNKNOWN: dict[str, Any] = {
    **Now()._asdict(),
    **dict.fromkeys(("dram", "dram_budget", "nvme", "nvme_budget"), 0),
    "rank": None,
}  # of a program with an earlier version of tiers


def render(programs: list[dict[str, Any]]) -> Iterator[RenderableType]:
    """Tables and lines for what `read_all` returns."""
    if not programs:
        yield _NOBODY
    for state in programs:
        verdict, values = state["verdict"], state["values"]
        yield f"{_named(state)}: {state['program']}"
        yield from _lines(_run(state))
        bus = f"{verdict['bus']:.0%} of the bus left"
        yield f"{said(verdict['state'], verdict['cause'])}, {bus}; {_deed(state['response'])}"
        lanes = Table("lane", "now", "bandwidth left")
        drives = _run(state)["nvme_budget"]
        for lane in (name.removesuffix(".moved") for name in values if name.endswith(".moved")):
            if lane.startswith(("disk", "gds")) and not (drives or values[f"{lane}.moved"]):
                continue
            left = verdict["left"].get(lane)
            lanes.add_row(lane, _rate(values[f"{lane}.moved"]), "" if left is None else f"{left:.0%}")
        yield lanes
        yield f"host: {_host(values)} (from {', '.join(state['sensors'])})"
        if state["changes"]:
            yield f"last change: {state['changes'][-1]}"


def _run(state: dict[str, Any]) -> dict[str, Any]:
    return {**_UNKNOWN, **state.get("run", {})}


def _lines(run: dict[str, Any]) -> Iterator[str]:
    """What a run has in use, and how fast it is."""
    tiers = [tier for tier in TIERS if run[f"{tier}_budget"] or run[tier]]
    if tiers:
        yield ", ".join(f"{tier} {format_size(run[tier])} of {format_size(run[f'{tier}_budget'])}" for tier in tiers)
    if run["step_s"] is None:
        yield "no step is timed yet"
    elif (fraction := _fraction(run)) is None:
        yield f"steps of {_ms(run['step_s'])}"
    else:
        yield f"steps of {_ms(run['step_s'])}, {fraction:.2f} of the speed that is predicted with all memory"


def _fraction(run: dict[str, Any]) -> float | None:
    """The speed relative to that with everything kept, by the rules of ``tiers report``."""
    measured = run["step_s"] and run["step_s"] * run["steps"] / max(run["iterations"], run["steps"], 1)
    answer = Answer(None, run["hbm"], run["hbm_budget"], run["ideal_s"], run["predicted_s"], measured, varies=False)
    return 1 / answer.times_as_long if answer.times_as_long else None


def use(programs: list[dict[str, Any]]) -> RenderableType:
    """One line a program, of what it has in use, and how fast it is."""
    table = _one_line_each(
        "pid", "rank", "program", *(f"{tier}, GiB" for tier in TIERS), "step", "speed", long="program"
    )
    for state in programs:
        run = _run(state)
        fraction = _fraction(run)
        tiers = [_of_budget(run[tier], run[f"{tier}_budget"]) for tier in TIERS]
        speed = "" if fraction is None else f"{fraction:.2f}"
        step = "" if run["step_s"] is None else _ms(run["step_s"])
        rank = "" if run["rank"] is None else str(run["rank"])
        table.add_row(f"{state['pid']}", rank, _cut(state["program"]), *tiers, step, speed)
    return table


def others(programs: list[dict[str, Any]], holders: list[Holder]) -> Iterator[str]:
    """Say who else holds host memory on the node."""
    shown = {state["pid"] for state in programs}
    if rest := [holder for holder in holders if holder.pid not in shown]:
        yield f"host memory held by others on this node: {describe_holders(rest)}"


def brief(programs: list[dict[str, Any]]) -> RenderableType:
    """One line a program, of what `read_all` returns."""
    table = _one_line_each("pid", "program", "verdict", "d2h", "h2d", "reaction", long="program verdict reaction")
    for state in programs:
        verdict, values = state["verdict"], state["values"]
        lanes = [_rate(values.get(f"{lane}.moved", 0.0)) for lane in ("d2h", "h2d")]
        verdict, deed = said(verdict["state"], verdict["cause"]), _deed(state["response"])
        table.add_row(f"{state['pid']}", _cut(state["program"]), _cut(verdict), *lanes, _cut(deed))
    return table


def _named(state: dict[str, Any]) -> str:
    rank = _run(state)["rank"]
    return f"{state['pid']}" if rank is None else f"{state['pid']} (rank {rank})"


def _of_budget(used: int, budget: int) -> str:
    return f"{used / GiB:.1f}/{budget / GiB:.1f}" if used or budget else ""


def _one_line_each(*headers: str, long: str) -> Table:
    """A table whose `long` columns, of cells that are cut, have what the others leave."""
    columns = (Column(header, no_wrap=header not in long.split()) for header in headers)
    return Table(*columns, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)


def _cut(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")


def _deed(response: dict[str, Any]) -> str:
    if response["ahead"] is None:
        return "not backed off"
    plans = ", plans count on what is left" if response["plan"] else ""
    return f"backed off to {response['share']:.0%}: {response['ahead']} groups ahead{plans}"


def _host(values: dict[str, float]) -> str:
    facts = []
    if "traffic" in values:
        facts.append(f"{_rate(values['traffic'])} on the bus")
    if "ours" in values:
        facts.append(f"{_rate(values['ours'])} ours")
    if "rx" in values:
        facts.append(f"PCIe in {_rate(values['rx'])}, out {_rate(values['tx'])}")
    if "own" in values:
        facts.append(f"cores: {values['own']:.1f} own, {values['tree']:.1f} workers, {values['others']:.1f} others")
    if "cpu" in values:
        facts.append(f"pressure: cpu {values['cpu']:.0%}, memory {values.get('memory', 0.0):.0%}")
    return "; ".join(facts) or "nothing known"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.1f} GB/s"
