"""``tiers plan``."""

from __future__ import annotations

import argparse
from pathlib import Path

from torch_tiers.cli.run_files import trace_and_links
from torch_tiers.cli.verb import FAILED, CliError, print_json, print_tables, size
from torch_tiers.config_keys import RATE, bytes_a_second, nearest
from torch_tiers.migrator.model.links import LANES
from torch_tiers.migrator.policies import MODULES


class PlanVerb:
    """Predict what policies make of a trace: step time, peak, moves, side by side and without a GPU.

    Reads trace.json of a directory that TIERS_RUN named. Exit code 1 if no plan fits.
    """

    name = "plan"

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Take the trace, the budget, the policies, and what to tell of them."""
        parser.add_argument(
            "trace",
            type=Path,
            metavar="TRACE",
            help="trace.json (.gz), or the run directory it is in",
        )
        parser.add_argument(
            "--budget",
            required=True,
            type=size,
            metavar="SIZE",
            help="the most HBM the program may allocate, such as 24GiB (a run plans for 95 or 98%% of TIERS_HBM)",
        )
        parser.add_argument(
            "--dram",
            type=size,
            metavar="SIZE",
            help="what dram holds, beside nvme.capacity (default: dram.capacity; where that is unset, all that moves)",
        )
        parser.add_argument(
            "--policy",
            default=("auto",),
            type=_policies,
            metavar="NAMES",
            help=f"policies, separated by commas: {', '.join(MODULES)}, or all (default: auto)",
        )
        parser.add_argument(
            "--links",
            default={},
            type=_links,
            metavar="RATES",
            help="bytes per second of lanes, such as d2h=55e9,h2d=55e9 (default: [links] of tiers.toml)",
        )
        parser.add_argument(
            "--explain",
            metavar="SITE",
            help="say why this saved tensor, such as GPT.blocks.3.contract:0, was kept, moved or recomputed",
        )
        parser.add_argument("--plot", type=Path, metavar="FILE", help="draw memory and moves: .svg, .png or .pdf")
        parser.add_argument("--force", action="store_true", help="replace an existing plot")

    def run(self, args: argparse.Namespace) -> int:
        """Plan, simulate and print."""
        from torch_tiers.planning import plot
        from torch_tiers.planning.compare import Candidate, compare, render, to_json
        from torch_tiers.planning.explain import explain
        from torch_tiers.probe.plot import check

        if args.plot:
            check(args.plot, force=args.force)
        trace, links, below = trace_and_links(args.trace, args.links, args.dram)
        outcomes = compare(trace, args.budget, links, args.policy, below)
        lines = list(explain(trace, links, outcomes, args.explain)) if args.explain else []
        if args.json:
            data = to_json(trace, args.budget, links, outcomes, below)
            print_json(data | {"explained": lines} if lines else data)
        else:
            print_tables([*render(trace, args.budget, links, outcomes, below), *lines])
        found = [outcome for outcome in outcomes.values() if isinstance(outcome, Candidate)]
        if args.plot and not found:
            raise CliError(f"{args.plot} is not written: there is no plan to draw", FAILED)
        if args.plot:
            plot.draw(trace, args.budget, outcomes, args.plot)
        return 0 if any(outcome.fits(args.budget) for outcome in found) else FAILED


def _policies(text: str) -> tuple[str, ...]:
    names = tuple(MODULES) if text == "all" else tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in MODULES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(MODULES)}{nearest(name, MODULES)}")
    return names


def _links(text: str) -> dict[str, float]:
    rates: dict[str, float] = {}
    for part in text.split(","):
        lane, _, rate = part.partition("=")
        if lane.strip() not in LANES:
            raise argparse.ArgumentTypeError(f"{lane.strip()!r} is none of {', '.join(LANES)}")
        try:
            rates[lane.strip()] = bytes_a_second(rate)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{part.strip()!r}: {RATE.accepts}") from None
    return rates
