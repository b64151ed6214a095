"""``tiers report``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from torch_tiers.allocator.errors import TiersError
from torch_tiers.allocator.sizes import format_size
from torch_tiers.cli import report_html, report_questions
from torch_tiers.cli.run_files import known_links, read_json, slowest_rank
from torch_tiers.cli.verb import CliError, print_json, print_tables
from torch_tiers.migrator.model import trace_json
from torch_tiers.migrator.model.fields import BadField
from torch_tiers.migrator.model.links import Links
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.planner.match import check_match
from torch_tiers.planning import answer, neighbours, why
from torch_tiers.planning.corrections import corrected
from torch_tiers.planning.ranks import render as render_ranks
from torch_tiers.planning.ranks import to_json as ranks_to_json
from torch_tiers.planning.stats import stats_from_json
from torch_tiers.run_directory import ENOUGH, LOSSES, PLAN, STATS, TRACE, by_iteration
from torch_tiers.topology.wear import Wear

_BAR = 20
_WAYS = {
    "d2h": "hbm to dram",
    "h2d": "dram to hbm",
    "disk_write": "dram to nvme",
    "disk_read": "nvme to dram",
    "gds_write": "hbm to nvme",
    "gds_read": "nvme to hbm",
}


class ReportVerb:
    """Print what a run did, and why its steps take what they take: tiers, lanes, stalls, the plan and what it costs.

    Reads stats.json, and where there was a plan trace.json and plan.json, of a directory that TIERS_RUN named. Of
    several ranks all are compared, and the slowest is told of. With --losses the exit code is 1 if they differ.
    """

    name = "report"

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Take the run directory."""
        parser.add_argument(
            "run_dir", type=Path, metavar="RUN_DIR", help="a directory that TIERS_RUN named, or its stats.json"
        )
        asked = parser.add_mutually_exclusive_group()
        asked.add_argument("--step", type=int, metavar="N", help="why this step was slow, and nothing else")
        asked.add_argument("--modules", action="store_true", help="which module moves most, and nothing else")
        asked.add_argument(
            "--losses", type=Path, metavar="OTHER", help="whether the losses are those of another run, and nothing else"
        )
        parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write a page about it: one HTML file")
        parser.add_argument("--png", type=Path, metavar="DIR", help="write the page's figures as pictures")
        parser.add_argument("--force", action="store_true", help="replace an existing page or pictures")

    def run(self, args: argparse.Namespace) -> int:
        """Read and print, or write a page; or answer one question."""
        drawn = args.output is not None or args.png is not None
        one_question = args.step is not None or args.modules or args.losses is not None
        if drawn and one_question:
            raise CliError("a page tells of all of a run: leave --step, --modules and --losses out")
        if args.losses is not None:
            return report_questions.losses(args.run_dir, args.losses, as_json=args.json)
        if drawn:
            report_html.check(args.output, args.png, force=args.force)
        try:
            run_dir, ranks = (args.run_dir, {}) if args.run_dir.is_file() else slowest_rank(args.run_dir)
            path = run_dir if run_dir.is_file() else run_dir / STATS
            if path.name in (PLAN, TRACE):
                raise CliError(f"{path} tells only a part; name its directory, or the stats.json in it")
            if not path.exists() and (path.parent / LOSSES).exists():
                raise CliError(
                    f"{path.parent} is a run without tiers, which keeps its losses alone: compare another with it by "
                    f"tiers report RUN_DIR --losses {path.parent}"
                )
            stats = read_json(path, stats_from_json)
        except OSError as error:
            raise CliError(
                f"{args.run_dir} cannot be read: {error.strerror}; name a directory that this user may read"
            ) from None
        account, beside = _account(path.parent, stats), [*render_ranks(ranks)] if ranks else []
        if beside and not args.json and not drawn:
            print_tables(beside)
        if args.step is not None:
            recomputing = account.why.result.recomputing if isinstance(account, Account) else 0.0
            return report_questions.step(path.parent, args.step, recomputing, as_json=args.json)
        if args.modules:
            if not isinstance(account, Account):
                why_not = "; ".join(account) or "the run ended before there was one"
                raise CliError(f"{path.parent} has no plan to read: {why_not}")
            return report_questions.modules(account.trace, account.plan, as_json=args.json)
        if drawn:
            written = _draw(path.parent, stats, account, beside, args)
            if not args.json:
                print_tables([f"{file}: {format_size(file.stat().st_size)}" for file in written])
                return 0
        if args.json:
            told = stats | (account.to_json() if isinstance(account, Account) else {})
            print_json(told | ({"rank": path.parent.name, "ranks": ranks_to_json(ranks)} if ranks else {}))
            return 0
        if not isinstance(account, Account):
            print_tables([*render(stats), *account])
            return 0
        print_tables([*answer.render(account.answer), *render(stats), *why.render(account.why)])
        if account.answer.needs is not None and account.why.result.ideal:
            print_tables([f"what other budgets would do: tiers suggest {path.parent}"])
        return 0


@dataclass(frozen=True, slots=True)
class Account:
    """What the last plan comes to: at one look, and in its parts."""

    answer: answer.Answer
    why: why.Why
    trace: Trace
    plan: Plan
    links: Links

    def to_json(self) -> dict[str, Any]:
        """Both as JSON."""
        return {"answer": answer.to_json(self.answer), "why": why.to_json(self.why)}


def render(stats: dict[str, Any]) -> Iterator[RenderableType]:
    """Tables and lines for the content of a stats.json."""
    yield (
        f"device {stats['device']}, allocator {stats['allocator']}, policy {stats['policy']}: "
        f"{stats['steps']} steps, {stats['iterations']} iterations, {stats['groups']} page groups"
    )
    yield _step(stats["step_s"])
    if stats["unmanaged_bytes"]:
        yield f"unmanaged: {format_size(stats['unmanaged_bytes'])} that custom functions keep without save_for_backward"
    tiers = Table("tier", "peak", "budget", "", title="tiers", title_justify="left")
    for tier, peak in stats["peak"].items():
        budget = stats["budget"][tier]
        tiers.add_row(tier, format_size(peak), _size(budget), _bar(peak, budget))
    yield tiers
    if stats.get("budget_share") and stats["peak"]["hbm"] > stats["budget"]["hbm"]:
        yield "hbm was over its budget in the steps before the first plan, which told what the share comes to"
    elif stats["device"] == "cpu" and stats["peak"]["hbm"] > stats["budget"]["hbm"]:
        yield "hbm is over its budget, which without a GPU is counted, not enforced"
    lanes = Table("lane", "", "moved in all", "per iteration", title="lanes", title_justify="left")
    moved_each, stalled_each = by_iteration(stats)
    for lane, moved in stats["moved"].items():
        if moved:
            lanes.add_row(lane, _WAYS.get(lane, ""), format_size(moved), format_size(int(moved_each[lane])))
    yield lanes if lanes.rows else "nothing was moved"
    if bounced := stats.get("bounced"):  # not there in those of earlier versions
        yield (
            f"cuFile failed: {format_size(bounced)} of what gds_write and gds_read count were copied through host "
            "memory; look for 'GPUDirect Storage at ... failed' on stderr"
        )
    if written := int(sum(moved_each.get(lane, 0) for lane in ("disk_write", "gds_write"))):
        yield _wear(written, stats["step_s"], stats.get("worn") or {"told": {}})
    stalls = Table("waiting for", "count", "time in all", "per iteration", title="stalls", title_justify="left")
    for cause, stall in stats["stalls"].items():
        stalls.add_row(cause, str(stall["count"]), _ms(stall["seconds"]), _ms(stalled_each[cause]))
    yield stalls if stalls.rows else "no stalls"
    if stats.get("flushes"):  # not there in those of earlier versions
        yield _flushes(stats)
    yield from neighbours.render(stats)
    if pages := stats.get("pages"):  # nor was this
        requests = max(1, pages["planned"] + pages["mispredicted"] + pages["misplaced"])
        yield (
            f"pages: {pages['planned'] / requests:.0%} of {requests} requests lay where they were foreseen; "
            f"{pages['maps']} mapped, {pages['unmaps']} unmapped, {pages['waits']} waits for the device; "
            f"{format_size(pages['dram'])} in dram at the end"
        )
    if stats["monitor"] is not None:
        monitor = stats["monitor"]
        yield f"backed off in {monitor['backed_off']} of {monitor['steps']} iterations that the monitor judged"
        yield from monitor["changes"]


def _account(directory: Path, stats: dict[str, Any]) -> Account | list[str]:
    """What the last plan comes to, or what keeps that from being told: nothing where there was no plan."""
    if not (directory / PLAN).exists():
        return []
    try:
        plan = read_json(directory / PLAN, Plan.from_json)
        trace = read_json(directory / TRACE, trace_json.read)
        check_match(plan, trace)
        direct = bool(stats["moved"].get("gds_write"))  # which those of earlier versions do not tell of
        dram, drive = stats["budget"].get("dram"), stats["budget"]["nvme"] or 0
        # What DRAM does not hold goes on to the drive, which takes many times as long.
        below = None if dram is None else dram + drive
        links = corrected(known_links({}, disk=bool(drive), direct=direct, below=below, dram=dram), stats)
    except (
        TiersError,
        BadField,
    ) as error:  # of a trace of another version, or of a configuration, of which stats need nothing
        return [f"no account of the plan: {error}"]
    account = why.why(trace, plan, links, stats)
    return Account(answer.answer_of(trace, links, stats, account), account, trace, plan, links)


def _draw(
    directory: Path,
    stats: dict[str, Any],
    account: Account | list[str],
    beside: list[RenderableType],
    args: argparse.Namespace,
) -> list[Path]:
    """Write the page and the pictures that are asked for, with what lies `beside`; the files that these are."""
    from torch_tiers.planning.html.drawn import styled
    from torch_tiers.planning.html.planned import planned
    from torch_tiers.planning.html.report import sections

    tables = [*beside, *render(stats), *(why.render(account.why) if isinstance(account, Account) else account)]
    if isinstance(account, Account):
        plan = planned(account.trace, account.plan, account.links, account.why, account.answer)
        head = [*answer.render(account.answer)]
    else:
        plan, budget, peak = None, stats["budget"]["hbm"], stats["peak"]["hbm"]
        ran = f"the budget was {format_size(budget)}, and the peak of the whole run {format_size(peak)}"
        head = [ran, *(account or ["the run left no plan"])]
    with styled():
        made = sections(stats, report_html.history_of(directory), plan)
        title = f"tiers report {directory.resolve().name}"
        return report_html.write(args.output, args.png, title, head, tables, made, force=args.force)


def _step(step: dict[str, Any]) -> str:
    if step["median"] is None:
        return "no step was completed"
    of_all = f"{_ms(step['min'])} to {_ms(step['max'])}"
    settled = step.get("settled", {"steps": 0})
    if settled["steps"] < ENOUGH:
        few = f", {settled['steps']} steps under the last plan" if settled["steps"] else ""
        return f"step {_ms(step['median'])} (median, learning included{few}; {of_all})"
    return (
        f"step {_ms(settled['median'])} (median of {settled['steps']} under the last plan; {of_all}, learning included)"
    )


def _flushes(stats: dict[str, Any]) -> str:
    """How often HBM was full; what comes of first steps, which keep to no plan, is none of the budget's fault."""
    flushes, ours = stats["flushes"], stats["allocator"] == "pages"
    gave = "idle memory was unmapped" if ours else "PyTorch's allocator gave back what it had cached"
    text = f"hbm was full {flushes} times: {gave}, for which the host waits for the device"
    settled = stats.get("settled") or {}
    learned = settled.get("iterations", 0) < stats["iterations"] and "flushes" in settled  # nor was this there
    if learned and not settled["flushes"]:
        return f"{text}; not once under the last plan"
    lately = f", {settled['flushes']} of them under the last plan" if learned else ""
    return f"{text}{lately}; " + ("raise TIERS_HBM" if ours else "set TIERS_ALLOCATOR=pages, or raise TIERS_HBM")


def _wear(written: int, step: dict[str, Any], worn: dict[str, Any]) -> str:
    """What nvme takes, and for how long the drives are made for that: each for so many bytes in all."""
    text = f"nvme takes {format_size(written)} an iteration"
    settled = step.get("settled", {"steps": 0})
    seconds = settled["median"] if settled["steps"] >= ENOUGH else step["median"]
    if not seconds:
        return text
    an_hour = int(written * 3600 / max(seconds, 1e-6))  # a step takes some microseconds, whatever a file says
    text += f", {format_size(an_hour)} an hour"
    drives = {name: Wear(told["percent"], told["written"]) for name, told in worn["told"].items()}
    if not drives:
        return text
    most = max(drives, key=lambda name: (drives[name].percent, -(drives[name].left or 0)))
    text += f"; {drives[most].percent}% of the rated write endurance of {most} is used"
    left = drives[most].left
    if left is None:
        return text
    # All processes write as much, to all drives: to each about the same.
    hours = left * worn["drives"] / max(an_hour * worn["processes"], 1)
    rest = f"{hours / 24:,.0f} days" if hours > 48 else f"{hours:.0f} hours"
    return f"{text}, and at this pace the rest lasts for {rest}"


def _size(nbytes: int | None) -> str:
    return "none" if nbytes is None else format_size(nbytes)


def _ms(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1e3:.1f} ms"


def _bar(used: int, budget: int | None) -> str:
    if not budget:
        return ""
    share = used / budget
    return f"{'█' * min(round(share * _BAR), _BAR):<{_BAR}} {share:.0%}"
