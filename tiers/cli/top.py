"""``tiers top``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table

from torch_tiers.cli.verb import CliError, Terminal, print_json, print_tables, writing
from torch_tiers.config import load
from torch_tiers.monitor.board import read_all
from torch_tiers.monitor.verdict import said
from torch_tiers.places import boards

_EVERY = 1.0  # seconds
_FEW = 2  # programs that a terminal of 24 lines has room for in full; of more, such as a node's ranks, one line each
_NOBODY = "no program of this user is running with tiers and its monitor"


class TopVerb:
    """Show what the monitors of this user's running programs see, and what they do about it.

    Lanes, traffic, verdict and back-off, refreshed every second until Ctrl-C; once with --once or --json, and where
    stdout is no terminal.
    """

    name = "top"

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Take whether to look once."""
        parser.add_argument("--once", action="store_true", help="print once and end")

    def run(self, args: argparse.Namespace) -> int:
        """Read and print."""
        console = Terminal()
        if args.json:
            print_json({"programs": _programs()})
        elif args.once or not console.is_terminal or console.is_dumb_terminal:
            print_tables(render(_programs()))  # a file would hold every picture, one below the other
        else:
            with writing(), Live(console=console, auto_refresh=False, screen=True) as live:
                while True:
                    programs = _programs()
                    shown = render(programs) if len(programs) <= _FEW else [brief(programs)]
                    live.update(Group(*shown), refresh=True)
                    time.sleep(_EVERY)
        return 0


def _programs() -> list[dict[str, Any]]:
    named = load(trains=False).config.ledger  # whether a run could begin is not what is asked
    states = []
    for place in boards(named):
        try:
            states += read_all(place)
        except PermissionError as error:
            if place == named:  # else programs pass it over, too
                raise CliError(
                    f"TIERS_LEDGER: {place} {error.strerror}; chmod go-w it if it is yours, else name another directory"
                ) from None
    return states


def render(programs: list[dict[str, Any]]) -> Iterator[RenderableType]:
    """Tables and lines for what `read_all` returns."""
    if not programs:
        yield _NOBODY
    for state in programs:
        verdict, values = state["verdict"], state["values"]
        yield f"{state['pid']}: {state['program']}"
        bus = f"{verdict['bus']:.0%} of the bus left"
        yield f"{said(verdict['state'], verdict['cause'])}, {bus}; {_deed(state['response'])}"
        lanes = Table("lane", "now", "bandwidth left")
        for lane in (name.removesuffix(".moved") for name in values if name.endswith(".moved")):
            left = verdict["left"].get(lane)
            lanes.add_row(lane, _rate(values[f"{lane}.moved"]), "" if left is None else f"{left:.0%}")
        yield lanes
        yield f"host: {_host(values)} (from {', '.join(state['sensors'])})"
        if state["changes"]:
            yield f"last change: {state['changes'][-1]}"


def brief(programs: list[dict[str, Any]]) -> RenderableType:
    """One line a program, of what `read_all` returns."""
    table = Table("pid", "program", "verdict", "d2h", "h2d", "reaction")
    for state in programs:
        verdict, values = state["verdict"], state["values"]
        lanes = [_rate(values.get(f"{lane}.moved", 0.0)) for lane in ("d2h", "h2d")]
        deed = _deed(state["response"])
        table.add_row(f"{state['pid']}", state["program"], said(verdict["state"], verdict["cause"]), *lanes, deed)
    return table


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


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.1f} GB/s"
