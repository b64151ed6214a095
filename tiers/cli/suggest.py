"""``tiers suggest``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from torch_tiers.cli.run_files import read_json, slowest_rank, trace_and_links
from torch_tiers.cli.verb import FAILED, CliError, print_json, print_tables, size
from torch_tiers.migrator.model.plan import FRAGMENTS, LAYOUTS
from torch_tiers.migrator.policies import MODULES
from torch_tiers.planning.stats import stats_from_json
from torch_tiers.run_directory import STATS


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
            "--dram", type=size, metavar="SIZE", help="what dram holds (default: dram.capacity; else all that moves)"
        )

    def run(self, args: argparse.Namespace) -> int:
        """Plan for several budgets and print what they come to."""
        from torch_tiers.planning.suggest import best, needed_of, offers, render, to_json

        found = slowest_rank(args.trace)[0] if args.trace.is_dir() else args.trace
        trace, links, below = trace_and_links(found, {}, args.dram)
        if not (trace.times and trace.others):
            raise CliError(
                f"{args.trace}: the trace has no times, or does not tell what else lies in hbm: record it anew"
            )
        stats = _stats(found)
        allocator = stats.get("allocator", "pages")
        needed, in_dram = needed_of(trace, links, stats)
        free = FRAGMENTS if allocator == "torch" else LAYOUTS
        made = offers(trace, needed, links, args.policy, free=free, below=below, in_dram=in_dram)
        if args.json:
            print_json(to_json(needed, made))
        else:
            print_tables(render(trace, needed, made, allocator, in_dram))
        return FAILED if best(made) is None else 0


def _stats(trace: Path) -> dict[str, Any]:
    """The numbers of the run that left the trace, a directory or a file in one; empty where there are none."""
    file = (trace if trace.is_dir() else trace.parent) / STATS
    return read_json(file, stats_from_json) if file.is_file() else {}
