"""``tiers bench``."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table

from torch_tiers.allocator.sizes import format_size
from torch_tiers.bench import IDEAL, Outcome, Variant, ended_in_order, run
from torch_tiers.cli.run import options_for, refuse_without_autoload
from torch_tiers.cli.verb import CliError, positive_seconds, print_json, print_tables
from torch_tiers.config import load
from torch_tiers.config_keys import USUAL_ALLOCATOR
from torch_tiers.run_directory import by_iteration


class BenchVerb:
    """Run a program at several budgets and compare: tiers bench --hbm 20GiB,30GiB -- python train.py.

    Each variant is a process of its own, one after the other; the first keeps everything, in all the HBM there is.
    Plans settle in the first tens of steps, and a step is the median of those under the last plan: let the program take
    40 steps or more. Exit code 1 if a variant failed.
    """

    name = "bench"

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Take the variants and the program."""
        parser.add_argument("--hbm", required=True, metavar="SIZES", help="budgets, separated by commas: 20GiB,30GiB")
        parser.add_argument(
            "--policy", default="auto", metavar="NAMES", help="policies, separated by commas (default: auto)"
        )
        parser.add_argument("--seconds", type=positive_seconds, metavar="S", help="interrupt each run after so long")
        parser.add_argument("--no-ideal", action="store_true", help="leave out the run that keeps everything")
        parser.add_argument("--out", type=Path, metavar="DIR", help="keep the run directories and outputs there")
        parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD ...", help="the program")

    def run(self, args: argparse.Namespace) -> int:
        """Check every variant, then run them, and print."""
        command = args.command[1:] if args.command[:1] == ["--"] else args.command
        if not command or shutil.which(command[0]) is None:
            raise CliError(f"{command[0]}: no such program" if command else "no program; write: -- python train.py")
        refuse_without_autoload(os.environ)
        try:
            if args.out is not None and args.out.exists():
                raise CliError(f"--out {args.out} is there already: name another directory")
        except OSError as error:
            raise CliError(f"--out {args.out}: {error.strerror}; name another directory") from None
        sizes, policies = ([word.strip() for word in text.split(",")] for text in (args.hbm, args.policy))
        if not all(sizes) or not all(policies):
            raise CliError("--hbm or --policy holds an empty entry; separate them by single commas: 20GiB,30GiB")
        variants = [Variant(policy, size) for size in sizes for policy in policies]
        environ = _environ(variants)
        outcomes: list[Outcome] = []
        with ended_in_order(), _directory(args.out) as directory, Console(stderr=True).status("") as status:
            for number, variant in enumerate([*([] if args.no_ideal else [IDEAL]), *variants]):
                status.update(f"{variant} ({number + 1} of {len(variants) + (not args.no_ideal)})")
                try:
                    outcomes.append(run(variant, command, environ, directory / f"{number}", args.seconds))
                except OSError as error:
                    raise CliError(f"{error.filename or command[0]}: {error.strerror}") from None
        if args.json:
            print_json([_entry(outcome, outcomes) for outcome in outcomes])
        else:
            print_tables(render(outcomes))
        return int(any(outcome.failed for outcome in outcomes))


def render(outcomes: Sequence[Outcome]) -> Iterator[RenderableType]:
    """The runs side by side, and what those that failed said last."""
    table = Table("policy", "hbm", "step", "of ideal", "peak hbm", "peak dram", "moved per iteration")
    for outcome in outcomes:
        row = [outcome.variant.policy, outcome.variant.hbm or "all"]
        stats, step, fraction = outcome.stats, outcome.step, _fraction(outcome, outcomes)
        if stats is None or step is None:
            row.append("failed")
        else:
            each, _ = by_iteration(stats)
            moved = int(each["d2h"] + each["h2d"])
            row += [f"{step * 1e3:.1f} ms" + (", failed" if outcome.failed else "")]
            row += ["unknown" if fraction is None else f"{fraction:.3f}"]
            row += [format_size(nbytes) for nbytes in (stats["peak"]["hbm"], stats["peak"]["dram"], moved)]
            if outcome.variant.hbm is not None and stats["peak"]["hbm"] > stats["budget"]["hbm"]:
                row[-3] += ", over"  # without a GPU, where budgets are counted
        table.add_row(*row)
    yield table
    for outcome in outcomes:
        if outcome.failed:
            if outcome.code == 0 or outcome.ended:
                what, said = "took no step", "; its last line: "
            else:
                what, said = f"ended with code {outcome.code}", ": "
            yield f"{outcome.variant} {what}" + (said + outcome.last_words if outcome.last_words else "")


def _fraction(outcome: Outcome, outcomes: Sequence[Outcome]) -> float | None:
    ideal = next((other.step for other in outcomes if other.variant == IDEAL and not other.failed), None)
    return None if ideal is None or not outcome.step else ideal / outcome.step


def _entry(outcome: Outcome, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "policy": outcome.variant.policy,
        "hbm": outcome.variant.hbm,
        "code": outcome.code,
        "failed": outcome.failed,
        "fraction_of_ideal": _fraction(outcome, outcomes),
        "last_words": outcome.last_words,
        "stats": outcome.stats,
    }


def _environ(variants: Sequence[Variant]) -> Mapping[str, str]:
    """The environment of all runs; each is checked now, not an hour from now."""
    allocator = load().config.allocator
    environ = {**os.environ, "TIERS_ALLOCATOR": USUAL_ALLOCATOR if allocator == "off" else allocator}
    for variant in variants:
        load(environ={**environ, **variant.environ}, options=options_for(variant.environ))
    return environ


@contextmanager
def _directory(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="tiers-bench-") as directory:
        yield Path(directory)
