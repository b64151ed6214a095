"""``tiers top``."""

from __future__ import annotations

import argparse
import time
from typing import Any

from rich.console import Group
from rich.live import Live

from torch_tiers.allocator.holders import Holder
from torch_tiers.cli.top_tables import brief, others, render, use
from torch_tiers.cli.verb import CliError, Terminal, print_json, print_tables, writing
from torch_tiers.config import load
from torch_tiers.monitor.board import read_all
from torch_tiers.monitor.claims import holders_of_host_memory
from torch_tiers.places import boards, ledgers

_EVERY = 1.0  # seconds
_FEW = 2  # programs that a terminal of 24 lines has room for in full; of more, such as a node's ranks, one line each


class TopVerb:
    """Show what this user's running programs have in use, how fast they are, and what their monitors see.

    Tiers against their budgets, step time, lanes, traffic, verdict and back-off, refreshed every second until Ctrl-C;
    once with --once or --json, and where stdout is no terminal.
    """

    name = "top"

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Take whether to look once."""
        parser.add_argument("--once", action="store_true", help="print once and end")

    def run(self, args: argparse.Namespace) -> int:
        """Read and print."""
        console = Terminal()
        if args.json:
            held = [{"pid": pid, "program": program, "bytes": nbytes} for nbytes, pid, program in _holders()]
            print_json({"programs": _programs(), "host_memory": held})
        elif args.once or not console.is_terminal or console.is_dumb_terminal:
            programs = _programs()  # a file would hold every picture, one below the other
            print_tables([*render(programs), *others(programs, _holders())])
        else:
            with writing(), Live(console=console, auto_refresh=False, screen=True) as live:
                while True:
                    programs = _programs()
                    shown = render(programs) if len(programs) <= _FEW else [use(programs), brief(programs)]
                    live.update(Group(*shown, *others(programs, _holders())), refresh=True)
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


def _holders() -> list[Holder]:
    return holders_of_host_memory(ledgers(load(trains=False).config.ledger))
