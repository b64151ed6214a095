"""``tiers bench``."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, RenderableType
from rich.table import Table

from torch_tiers.allocator.sizes import format_size
from torch_tiers.bench.losses import PATTERN
from torch_tiers.bench.program import ended_in_order
from torch_tiers.bench.rounds import PlainFails, Rounds
from torch_tiers.bench.rows import Row, Spread, rows
from torch_tiers.bench.variants import PEERS, PLAIN, Variant, given, peers, share, under_tiers
from torch_tiers.cli import report_html
from torch_tiers.cli.run import options_for, refuse_without_autoload
from torch_tiers.cli.verb import FAILED, CliError, positive_seconds, print_json, print_tables
from torch_tiers.config import load
from torch_tiers.config_keys import USUAL_ALLOCATOR


class BenchVerb:
    """Run a program as it is and in less memory, and compare: tiers bench --hbm 20GiB,30GiB -- python train.py.

    Each run is a process of its own. Variants take turns, round by round; the first is the program as it is, and the
    bench stops if that fails, unless it is out of GPU memory. Plans settle in the first tens of steps, and the second
    half of the steps counts: let the program take 60 or more. With --out the same command goes on where it was stopped.
    Exit code 1 if a variant failed.
    """

    name = "bench"

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Take the variants and the program."""
        parser.add_argument(
            "--hbm",
            required=True,
            metavar="SIZES",
            help="budgets: 20GiB, or 60%% of what the program reserves: 75%%,20GiB",
        )
        parser.add_argument(
            "--policy", default="auto", metavar="NAMES", help="policies, separated by commas (default: auto)"
        )
        parser.add_argument(
            "--peers",
            nargs="?",
            const=",".join(PEERS),
            default="",
            metavar="NAMES",
            help="also what needs no change of the program: save_on_cpu; compiled, torch.compile's "
            "activation_memory_budget where the program compiles; static split, our allocator alone (default: all)",
        )
        parser.add_argument(
            "--variant",
            action="append",
            default=[],
            metavar="NAME=CMD",
            help="also another command, as it is: 'own checkpointing=python train.py --checkpoint'; may be repeated",
        )
        parser.add_argument("--rounds", type=_count, default=3, metavar="N", help="runs of each (default: 3)")
        parser.add_argument("--seconds", type=positive_seconds, metavar="S", help="interrupt each run after so long")
        parser.add_argument(
            "--loss", type=_pattern, default=PATTERN, metavar="REGEX", help="finds the losses in what it prints"
        )
        parser.add_argument("--out", type=Path, metavar="DIR", help="keep runs and outputs there, and go on from them")
        parser.add_argument("--retry", action="store_true", help="with --out: run again what failed")
        parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write a page with a figure: bench.html")
        parser.add_argument("--png", type=Path, metavar="DIR", help="write the figure as a picture there")
        parser.add_argument("--force", action="store_true", help="replace a page or picture that is there")
        parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD ...", help="the program")

    def run(self, args: argparse.Namespace) -> int:
        """Check every variant, then run them, and print."""
        command = args.command[1:] if args.command[:1] == ["--"] else args.command
        if not command:
            raise CliError("no program; write: -- python train.py")
        refuse_without_autoload(os.environ)
        variants = _variants(args)
        for words in (command, *(variant.command for variant in variants if variant.command)):
            if shutil.which(words[0]) is None:
                raise CliError(f"{words[0]}: no such program")
        environ = _environ(variants)
        if args.output is not None or args.png is not None:
            report_html.check(args.output, args.png, force=args.force)
        with ended_in_order(), _directory(args.out) as directory, Console(stderr=True).status("") as status:
            bench = Rounds(command, variants, directory, environ, args.loss, args.seconds, args.retry, status.update)
            try:
                bench.all(args.rounds)
            except PlainFails as error:
                raise CliError(
                    f"{error}; all that it said is in its output.txt, which --out DIR keeps", FAILED
                ) from None
            except OSError as error:
                raise CliError(f"{error.filename or command[0]}: {error.strerror}") from None
        made = list(rows(bench.outcomes))
        if args.json:
            print_json([row.to_json() for row in made])
        else:
            print_tables(render(made))
        if args.output is not None or args.png is not None:
            _draw(made, " ".join(command), args)
        return int(any(row.reason and not row.left_out for row in made))


def render(made: Sequence[Row]) -> Iterator[RenderableType]:
    """The variants side by side, and what those that failed said."""
    table = Table("variant", "step", "of plain", "hbm", "moved", "losses")
    for row in made:
        line = [row.variant.name]
        if row.step is None:
            table.add_row(*line, "left out" if row.left_out else "failed")
            continue
        line.append(_spread(Spread(*(1e3 * x for x in (row.step.median, row.step.low, row.step.high))), ".1f", " ms"))
        line.append(("" if row.settled else "~") + _spread(row.fraction, ".3f"))
        line.append(_memory(row))
        line.append("" if row.moved is None else format_size(row.moved))
        table.add_row(*line, row.losses)
    yield table
    yield "moved: bytes of an iteration, both ways; a fraction is of the plain run of the same round"
    if any(not row.settled for row in made):
        yield "~ plans changed in the steps that count: have the program take more"
    for row in made:
        if row.reason:
            yield f"{row.variant.name}: {row.reason}" + ("" if row.step is None else ", in a later round")


def _memory(row: Row) -> str:
    taken = "unknown" if row.memory is None else format_size(row.memory)
    return taken + (f" of {row.budget}" if row.budget else "") + (", over" if row.over else "")


def _spread(of: Spread | None, form: str, unit: str = "") -> str:
    if of is None:
        return "unknown"
    text = f"{of.median:{form}}{unit}"
    return text if of.low == of.high else f"{text} ({of.low:{form}} to {of.high:{form}})"


def _draw(made: Sequence[Row], command: str, args: argparse.Namespace) -> None:
    from torch_tiers.planning.html import drawn
    from torch_tiers.planning.html.speed import Point, speed

    points = [
        Point(
            row.variant.name,
            "peer" if row.variant.allocator else row.variant.kind,  # the static split is none of tiers' plans
            f"{row.variant.allocator} {row.variant.policy}".strip(),
            row.memory,
            row.fraction.median,
            row.fraction.low,
            row.fraction.high,
        )
        for row in made
        if row.fraction is not None
    ]
    with drawn.styled():
        files = report_html.write(
            args.output, args.png, f"tiers bench {command}", [command], render(made), [speed(points)], force=args.force
        )
    if not args.json:
        print_tables(f"{file}: written" for file in files)


def _variants(args: argparse.Namespace) -> list[Variant]:
    sizes, policies = ([word.strip() for word in text.split(",")] for text in (args.hbm, args.policy))
    if not all(sizes) or not all(policies):
        raise CliError("--hbm or --policy holds an empty entry; separate them by single commas: 20GiB,30GiB")
    for size in sizes:
        if size.endswith("%"):
            share(size)
    named = [word.strip() for word in args.peers.split(",")] if args.peers else []
    for name in named:
        if name not in PEERS:
            raise CliError(f"{name!r} is no peer; there are {', '.join(PEERS)} (--peers), and -- before the program")
    found = [PLAIN, *under_tiers(sizes, policies), *peers(sizes, named), *map(given, args.variant)]
    twice = [name for name, count in Counter(variant.name for variant in found).items() if count > 1]
    if twice:
        raise CliError(f"{twice[0]} is there twice: give each variant a name of its own")
    return found


def _environ(variants: Sequence[Variant]) -> Mapping[str, str]:
    """The environment of programs under tiers; each is checked now, not an hour from now."""
    allocator = load().config.allocator
    environ = {**os.environ, "TIERS_ALLOCATOR": USUAL_ALLOCATOR if allocator == "off" else allocator}
    for variant in variants:
        if variant.kind == "tiers":
            own = {"TIERS_POLICY": variant.policy}
            own |= {} if variant.budget.endswith("%") else {"TIERS_HBM": variant.budget}
            load(environ={**environ, **own}, options=options_for(own))
    return environ


@contextmanager
def _directory(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="tiers-bench-") as directory:
        yield Path(directory)


def _count(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of rounds, from 1 on")
    return int(text)


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None
    return text
