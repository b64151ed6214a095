"""The command line; see the package."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import benchmarks.fractions
from benchmarks.fractions.cells import WORKLOADS, cells, machine
from benchmarks.fractions.driver import Run
from benchmarks.fractions.processes import Setting
from benchmarks.fractions.results import Results


def main(words: list[str] | None = None) -> None:
    """Run from the command line."""
    words = sys.argv[1:] if words is None else words
    if words[:1] == ["worker"]:
        from benchmarks.fractions.worker import main as work

        work(words[1:])
        return
    options = _parser().parse_args(words)
    try:
        {"run": _run, "show": _show, "merge": _merge, "largest": _largest}[options.verb](options)
    except ValueError as error:  # of a name or a file
        raise SystemExit(f"fractions: {error}") from None


def _run(options: argparse.Namespace) -> None:
    wanted = list(cells(options.workloads, options.budgets, options.methods))
    run = Run(
        Results(options.results),
        machine(),
        _setting(options),
        options.seconds,
        options.timeout,
        beside=options.beside,
        retry=options.retry,
    )
    run.all(wanted)


def _show(options: argparse.Namespace) -> None:
    from benchmarks.fractions.table import show

    if not options.file.exists():
        raise ValueError(f"{options.file} does not exist")
    print(show(Results(options.file), markdown=options.markdown, every=options.every, latest=options.latest))


def _merge(options: argparse.Namespace) -> None:
    results = Results(options.file)
    for path in options.others:
        results.merge(Results(path))
    if options.newest:
        results.condense()


def _largest(options: argparse.Namespace) -> None:
    from benchmarks.fractions.largest import Largest

    setting = _setting(options, learning=(8, 96), settled=4, timed=4)
    Largest(
        Results(options.results),
        machine(),
        setting,
        options.seconds,
        options.timeout,
        multiple=options.multiple,
        most=options.most,
        first=options.first,
    ).all(options.workload, options.methods)


def _setting(options: argparse.Namespace, **lengths: Any) -> Setting:
    given = {"learning": options.learning, "settled": options.steps, "timed": options.steps}
    lengths |= {name: value for name, value in given.items() if value is not None}
    trl = options.trl.resolve() if options.trl else None
    if trl is not None and not trl.is_file():
        raise ValueError(f"{trl} is no file")
    return Setting(options.tiny, options.dram, trl, options.runs, tuple(lengths.items()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fractions",
        description=benchmarks.fractions.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run", help="measure what is missing, the first named first")
    run.add_argument("--workloads", type=_words, default=list(WORKLOADS))
    run.add_argument(
        "--budgets", type=_numbers, default=[75, 60, 45], help="percent of what the plain program reserves"
    )
    run.add_argument("--methods", type=_words, default=["tiers:auto", "checkpoint-k", "checkpoint", "save_on_cpu"])
    run.add_argument("--beside", action="store_true", help="measure the best so far again beside auto")
    run.add_argument("--retry", action="store_true", help="measure again what failed or had not settled")
    largest = verbs.add_parser("largest", help="the largest batch that costs at most a tenth of the speed per sample")
    largest.add_argument("--workload", default="reference_gpt")
    largest.add_argument("--methods", type=_words, default=["pages:auto", "checkpoint-k"])
    largest.add_argument("--multiple", type=int, default=8, help="that batches are multiples of")
    largest.add_argument("--most", type=int, default=1024, help="the largest batch that is tried")
    largest.add_argument("--first", type=int, default=0, help="the batch that is tried first (default: the smallest)")
    for verb in (run, largest):
        verb.add_argument("--results", type=Path, required=True)
        verb.add_argument("--seconds", type=float, default=600.0, help="after which it stops; the next run goes on")
        verb.add_argument("--timeout", type=float, default=240.0, help="seconds that one measurement may take")
        verb.add_argument("--dram", default="64GiB")
        verb.add_argument("--trl", type=Path, help="TRL's trl/models/activation_offloading.py")
        verb.add_argument(
            "--runs", type=Path, help="directory for what ours leave with TIERS_RUN; to record takes time"
        )
        verb.add_argument("--steps", type=int, help="that are timed")
        verb.add_argument("--learning", type=_numbers, metavar="LEAST,MOST", help="steps before timing ours")
        verb.add_argument("--tiny", action="store_true", help="the small workloads: tells nothing about speed")
    merge = verbs.add_parser("merge", help="take over what other files have that is newer")
    merge.add_argument("file", type=Path)
    merge.add_argument("others", type=Path, nargs="*")
    merge.add_argument(
        "--newest", action="store_true", help="keep each cell as it was measured last, without its steps"
    )
    show = verbs.add_parser("show", help="print what was measured")
    show.add_argument("file", type=Path)
    show.add_argument("--markdown", action="store_true")
    show.add_argument("--every", action="store_true", help="cell by cell, too")
    show.add_argument("--latest", action="store_true", help="each cell as it was measured last, with whatever code")
    return parser


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _numbers(text: str) -> list[int]:
    return [int(word) for word in _words(text)]


if __name__ == "__main__":
    main()
