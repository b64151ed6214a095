"""``tiers probe``."""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from torch_tiers.cli.verb import CliError, positive_seconds, print_json, print_tables
from torch_tiers.config import load
from torch_tiers.config_keys import CONFIG_ENV
from torch_tiers.log import set_up

_SECONDS = 40.0
_QUICK_SECONDS = 10.0
_SUSTAINED_SECONDS = 120.0
_QUICK_SAMPLES = 3


class ProbeVerb:
    """Measure every path between HBM, DRAM and NVMe, with the arenas and stores that a run uses.

    With --write, runs and tiers plan use what was measured. Exit code 1 if a path failed; one that cannot run here is
    waived, with the reason.
    """

    name = "probe"

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Take what to measure, how long, and where the results go."""
        parser.add_argument(
            "--paths", default="*", metavar="KINDS", help="only these, such as 'd2h,h2d,disk_*' (default: all)"
        )
        parser.add_argument(
            "--nvme-path",
            action="append",
            type=Path,
            metavar="DIR",
            help="directory to measure; may be repeated (default: nvme.paths)",
        )
        parser.add_argument(
            "--seconds", type=positive_seconds, metavar="S", help="time to measure for, about (default: 40)"
        )
        parser.add_argument("--quick", action="store_true", help="four sizes and a few runs each, in 10 seconds")
        parser.add_argument("--sustained", action="store_true", help="write past the drives' caches, in 120 seconds")
        parser.add_argument("--contention", action="store_true", help="measure also while the memory bus is under load")
        parser.add_argument("--no-verify", action="store_true", help="do not check the data")
        parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a chart: .svg, .png or .pdf")
        parser.add_argument("--write", action="store_true", help="put the results into [links] of tiers.toml")
        parser.add_argument("--force", action="store_true", help="replace existing links or an existing plot")

    def run(self, args: argparse.Namespace) -> int:
        """Check everything that can be checked at once, then measure, print and write."""
        resolved = load()
        # Importing torch must not start the runtime beside its own measurement.
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        from torch_tiers.probe import links, plot, run, table
        from torch_tiers.probe.measure import QUICK_SIZES, SIZES, Effort
        from torch_tiers.probe.results import to_json

        nvme = resolved.config.nvme
        options = run.Options(
            patterns=tuple(pattern.strip() for pattern in args.paths.split(",")),
            effort=Effort(QUICK_SIZES, _QUICK_SAMPLES, not args.no_verify)
            if args.quick
            else Effort(SIZES, verify=not args.no_verify),
            seconds=args.seconds or _default_seconds(args),
            directories=_directories(args.nvme_path) if args.nvme_path else nvme.paths,
            checksum=nvme.checksum,
            gds=nvme.gds,
            sustained=args.sustained,
            contention=args.contention,
        )
        file = Path(os.environ.get(CONFIG_ENV) or "tiers.toml").expanduser()
        if args.plot:
            plot.check(args.plot, force=args.force)
        if args.write:
            links.refuse_if_not_writable(file)
        if args.write and not args.force:
            links.refuse_to_overwrite(file, run.lanes_of(options.patterns))
        set_up(resolved.config.log)
        with _said_once(), _bar() as bar:
            report = run.probe(options, lambda total: _begin(bar, total))
        if args.json:
            print_json(to_json(report))
        else:
            print_tables(table.render(report))
        if args.plot:
            plot.draw(report, args.plot)
        if args.write:
            written = links.write_links(file, links.measured_links(report), force=args.force)
            print(f"tiers: wrote {', '.join(written)} to [links] of {file}", file=sys.stderr)
        return int(any(result.status == "failed" for result in report.results))


def _default_seconds(args: argparse.Namespace) -> float:
    if args.sustained:
        return _SUSTAINED_SECONDS
    return _QUICK_SECONDS if args.quick else _SECONDS


def _directories(given: list[Path]) -> tuple[Path, ...]:
    try:
        for path in given:
            if not path.is_dir():
                raise CliError(f"--nvme-path {path} is not a directory; create it or name another")
        return tuple(path.absolute() for path in given)
    except OSError as error:
        raise CliError(f"--nvme-path {path}: {error.strerror}; name another directory") from None


@contextmanager
def _said_once() -> Iterator[None]:
    """Let every line of the log through once: a store is opened for each size, and warns each time."""
    said: set[str] = set()

    def first_time(record: logging.LogRecord) -> bool:
        known = len(said)
        said.add(record.getMessage())
        return len(said) > known

    log = logging.getLogger("tiers")
    log.addFilter(first_time)
    try:
        yield
    finally:
        log.removeFilter(first_time)


def _bar() -> Bar:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Bar(*columns, console=console, transient=True, disable=not console.is_terminal)


def _begin(bar: Bar, total: int) -> Callable[[str], None]:
    """Start the bar; what is returned is to be told the label of each path."""
    task = bar.add_task("", total=total)
    count = itertools.count()

    def on_path(label: str) -> None:
        bar.update(task, description=label, completed=next(count))

    return on_path
