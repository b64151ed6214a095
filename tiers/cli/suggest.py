"""``tiers suggest``."""

from __future__ import annotations

import argparse
from pathlib import Path

from torch_tiers.allocator.sizes import parse_size
from torch_tiers.cli.run_files import known_below, known_links, read_json
from torch_tiers.cli.verb import FAILED, CliError, print_json, print_tables
from torch_tiers.migrator.model import trace_json
from torch_tiers.migrator.model.plan import LAYOUTS
from torch_tiers.migrator.policies import MODULES
from torch_tiers.run_directory import TRACE


class SuggestVerb:
    """Predict a program's speed over its budget, and suggest a budget.

    Reads trace.json of a directory that TIERS_RUN named. Exit code 1 if the program fits none of the budgets.
    """

    name = "suggest"

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Take the trace, the policy, and what DRAM holds."""
        parser.add_argument(
            "trace", type=Path, metavar="RUN_DIR", help="a directory that TIERS_RUN named, or a trace.json"
        )
        parser.add_argument("--policy", default="auto", choices=tuple(MODULES), help="the policy (default: auto)")
        parser.add_argument(
            "--dram",
            type=parse_size,
            metavar="SIZE",
            help="what dram holds (default: dram.capacity; else all that moves)",
        )

    def run(self, args: argparse.Namespace) -> int:
        """Plan for several budgets and print what they come to."""
        from torch_tiers.planning.suggest import best, needs, offers, render, to_json

        file = args.trace if args.trace.suffix in (".json", ".gz") else args.trace / TRACE
        trace = read_json(file, trace_json.read)
        if not (trace.times and trace.others):
            raise CliError(
                f"{file} has no times, or does not tell what else lies in hbm: record it on a GPU or a CPU anew"
            )
        below, dram = known_below(args.dram)
        has_disk = below is not None and dram is not None and below > dram
        links = known_links({}, disk=has_disk, below=below, dram=dram)
        needed = needs(trace, links)
        made = offers(trace, links, args.policy, free=LAYOUTS, below=below)
        if args.json:
            print_json(to_json(needed, made))
        else:
            print_tables(render(trace, needed, made))
        return FAILED if best(made) is None else 0
