"""The console script: parses the command line and runs one verb."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Sequence

import torch_tiers as tiers
from torch_tiers.allocator.errors import TiersError
from torch_tiers.cli.bench import BenchVerb
from torch_tiers.cli.config import ConfigVerb
from torch_tiers.cli.doctor import DoctorVerb
from torch_tiers.cli.plan import PlanVerb
from torch_tiers.cli.probe import ProbeVerb
from torch_tiers.cli.report import ReportVerb
from torch_tiers.cli.run import RunVerb
from torch_tiers.cli.suggest import SuggestVerb
from torch_tiers.cli.top import TopVerb
from torch_tiers.cli.verb import BAD_INPUT, Verb
from torch_tiers.config_keys import nearest
from torch_tiers.printable import complain

VERBS: tuple[Verb, ...] = (
    ProbeVerb(),
    RunVerb(),
    ConfigVerb(),
    DoctorVerb(),
    ReportVerb(),
    SuggestVerb(),
    TopVerb(),
    PlanVerb(),
    BenchVerb(),
)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser from the list of verbs."""
    parser = argparse.ArgumentParser(
        prog="tiers",
        description="Run PyTorch programs in less GPU memory than they need.",
    )
    parser.add_argument("--version", action="version", version=f"torch-tiers {tiers.__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    for verb in VERBS:
        text = inspect.getdoc(verb) or ""
        sub = verbs.add_parser(verb.name, help=text.splitlines()[0], description=text)
        sub.add_argument("--json", action="store_true", help="write JSON instead of tables")
        sub.set_defaults(do=verb.run)
        verb.prepare(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``tiers`` and return its exit code: 0, 2 for bad input, or what the verb says."""
    parser, words = build_parser(), sys.argv[1:] if argv is None else argv
    names = [verb.name for verb in VERBS]
    if words and not words[0].startswith("-") and words[0] not in names:
        parser.error(f"no verb is called {words[0]!r}: it must be one of {', '.join(names)}{nearest(words[0], names)}")
    args = parser.parse_args(words)
    if args.verb is None:
        parser.print_help()
        return 0
    try:
        code: int = args.do(args)
    except TiersError as error:
        complain(error)
        return getattr(error, "code", BAD_INPUT)
    except KeyboardInterrupt:
        return 130
    return code
