"""The results as tables: fractions of ideal by budget and method, the simulator against reality. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from benchmarks.fractions.cells import COMPILED, WORKLOADS, parse
from benchmarks.fractions.results import Record, Results, fits
from torch_tiers.allocator.sizes import GiB

Table = list[list[str]]
REASON = 60  # letters of a reason; the file has all
OLDER = "†"  # at what was measured with older code


def show(results: Results, *, markdown: bool = False, every: bool = False, latest: bool = False) -> str:
    """What was measured, machine by machine.

    Parameters
    ----------
    every
        Cell by cell, too.
    latest
        Each cell as it was measured last, marked where that was with older code than others; else those are left out.
    """
    parts = []
    for machine in dict.fromkeys(record["machine"] for record in results.cells + results.tries):
        found = [record for record in results.cells if record["machine"] == machine]
        records = last_of_each(found) if latest else newest(found)
        codes = sorted({record["code"] + (f" ({record['commit']})" if record["commit"] else "") for record in records})
        parts.append(f"# {machine}" + (f", code {', '.join(codes)}" if codes else ""))
        if latest and any(record["older"] for record in records):
            parts.append(f"{OLDER} measured with older code.")
        elif not latest and len(found) > len(records):
            parts.append(f"{len(found) - len(records)} cells of older code are left out.")
        workloads = dict.fromkeys([*WORKLOADS, *(record["workload"] for record in records)])
        for workload in workloads:
            of = [record for record in records if record["workload"] == workload]
            if of:
                parts += [f"## {workload}", conditions(of), render(fractions(of), markdown=markdown)]
                parts += [render(details(of), markdown=markdown)] if every else []
        if accuracy := simulator(records):
            parts += ["## Simulator against reality", render(accuracy, markdown=markdown)]
        if tries := [record for record in results.tries if record["machine"] == machine]:
            parts += ["## Largest batch", render(batches(newest(tries)), markdown=markdown)]
    return "\n\n".join(parts)


def newest(records: Sequence[Record]) -> list[Record]:
    """Those of the code that was measured last, ours and the peers' each."""
    last: dict[bool, str] = {}
    for record in sorted(records, key=lambda record: record["when"]):
        last[parse(record["method"]).ours] = record["code"]
    return [record for record in records if record["code"] == last[parse(record["method"]).ours]]


def last_of_each(records: Sequence[Record]) -> list[Record]:
    """Each cell as it was measured last; `older` if with other code than that which `newest` takes."""
    last: dict[tuple[object, ...], Record] = {}
    for record in sorted(records, key=lambda record: record["when"]):
        last[record["workload"], record["budget"], record["method"]] = record
    codes = {record["code"] for record in newest(records)}
    return [record | {"older": record["code"] not in codes} for record in last.values()]


def conditions(records: Sequence[Record]) -> str:
    """What the ideal was, in a sentence."""
    done = [record for record in records if record["status"] == "ok"]
    if not done:
        return "Nothing could be measured."
    ideals = [record["ideal_step"] * 1e3 for record in done]
    clocks = [clock for record in done for clock in (record["sm_clock"], record["ideal_sm_clock"]) if clock]
    sizes = [record["plain_reserved"] / GiB for record in done]
    noise = max(record["ideal_loss_difference"] for record in done)
    text = f"Ideal: {median(ideals):.1f} ms ({min(ideals):.1f} to {max(ideals):.1f}), {median(sizes):.2f} GiB reserved"
    if clocks:
        text += f"; SM clock {min(clocks)} to {max(clocks)} MHz, median {median(clocks):.0f}"
    if hosts := [record[of] for record in done for of in ("host_us", "ideal_host_us") if of in record]:
        text += f"; host {min(hosts):.0f} to {max(hosts):.0f} us"
    return f"{text}; its losses differ from its own by {noise:.1e} at most."


def fractions(records: Sequence[Record]) -> Table:
    """A row a method, a column a budget: fraction of ideal and GiB reserved; the best at each budget is marked.

    Compiled methods have a second fraction, of the compiled program with unlimited HBM, and a mark of their own.
    """
    budgets = sorted({record["budget"] for record in records if record["budget"] is not None}, reverse=True) or [100]
    base = {r["compiled"]: r["fraction"] for r in records if _is_base(r) and r["compiled"] and r["status"] == "ok"}
    rows: dict[str, dict[int, Record]] = {}
    for record in records:
        for budget in budgets if record["budget"] is None else [record["budget"]]:
            row = rows.setdefault(_row(record), {})
            row[budget] = _better(row[budget], record, budget) if budget in row else record
    table = [["method", *(f"{budget}%" for budget in budgets), "losses"]]
    for name, row in rows.items():
        line = [name]
        for budget in budgets:
            if (found := row.get(budget)) is None:
                line.append("")
                continue
            text = entry(found, budget, base)
            line.append(f"**{text}**" if found is _best(rows, budget, found) else text)
        table.append([*line, _losses(row.values())])
    return table


def entry(record: Record, budget: int, base: dict[str, float]) -> str:
    """One cell of the table."""
    if record["status"] != "ok":
        return f"{record['status']}: {record['reason'][:REASON]}"
    text = f"{record['fraction']:.3f}"
    if record["compiled"] in base:
        text += f" ({record['fraction'] / base[record['compiled']]:.3f} of compiled)"
    text += f", {record['reserved'] / GiB:.1f} GiB"
    if "blocks" in record:
        text += f", {record['blocks']} blocks"
    if _row(record).endswith("-budget"):
        text += f", {record['method']}"
    if not record["settled"]:
        text += ", not settled"
    if record.get("older"):
        text += f" {OLDER}"
    return text if record["method"] == "ideal" or fits(record, budget) else f"does not fit: {text}"


def details(records: Sequence[Record]) -> Table:
    """A row a cell, with what the table of fractions leaves out; times in ms, sizes in GiB, moved bytes a step.

    Predicted steps and peaks stand with their errors: of the step, and of the allocated bytes.
    """
    head = ["budget", "method", "step", "predicted", "worst", "ideal", "worst", "reserved", "allocated", "predicted"]
    table = [[*head, "out", "back", "stalled", "first steps", "SM MHz", "ideal's", "losses differ"]]
    for record in records:
        if record["status"] == "ok":
            moved = record.get("moved", {})
            table.append(
                [
                    "any" if record["budget"] is None else f"{record['budget']}%",
                    record["method"] + (f" {OLDER}" if record.get("older") else ""),
                    f"{record['step'] * 1e3:.1f}",
                    _with_error(record.get("predicted_step"), record["step"], 1e-3, ".1f"),
                    *(f"{record[name] * 1e3:.1f}" for name in ("worst", "ideal_step", "ideal_worst")),
                    *(f"{record[name] / GiB:.2f}" for name in ("reserved", "allocated")),
                    _with_error(record.get("predicted_peak"), record["allocated"], GiB, ".2f"),
                    *(f"{moved.get(lane, 0) / GiB:.2f}" for lane in ("d2h", "h2d")),
                    f"{sum(record.get('stalls', {}).values()) * 1e3:.1f}",
                    str(record["learning"]) + ("" if record["settled"] else ", not settled"),
                    str(record["sm_clock"]),
                    str(record["ideal_sm_clock"]),
                    f"{record['loss_difference']:.1e}",
                ]
            )
    return table


def simulator(records: Sequence[Record]) -> Table:
    """How far predicted steps and peaks are from what was measured; the peak counts allocated bytes."""
    table: Table = []
    told = [record for record in records if record["status"] == "ok" and "predicted_step" in record]
    for workload in [*dict.fromkeys(record["workload"] for record in told), "all"]:
        of = [record for record in told if workload in ("all", record["workload"])]
        steps = [record["predicted_step"] / record["step"] - 1 for record in of]
        # With our own allocator what is allocated may lie in DRAM, too: then it is more than HBM held.
        here = [record for record in of if 0 < record["allocated"] <= record["reserved"]]
        peaks = [record["predicted_peak"] / record["allocated"] - 1 for record in here]
        if of:
            table.append([workload, str(len(of)), *_errors(steps), *_errors(peaks)])
    head = ["workload", "cells", "step: median error", "worst", "peak: median error", "worst"]
    return [head, *table] if table else []


def batches(tries: Sequence[Record]) -> Table:
    """The largest batch of each method that is within a tenth of the ideal's best speed per sample."""
    from benchmarks.fractions.largest import LOSS, best_speed

    table = [["workload", "method", "largest batch", "samples/s", "of ideal's best", "tried"]]
    for workload, method in dict.fromkeys((record["workload"], record["method"]) for record in tries):
        best = best_speed(tries, workload)
        of = [record for record in tries if (record["workload"], record["method"]) == (workload, method)]
        good = [r for r in of if r["speed"] is not None and best is not None and r["speed"] >= (1 - LOSS) * best]
        tried = ", ".join(
            f"{r['batch']}: {r['speed']:.2f}" if r["speed"] is not None else f"{r['batch']}: {r['reason'][:REASON]}"
            for r in sorted(of, key=lambda record: record["batch"])
        )
        top = max(good, key=lambda record: record["batch"], default=None)
        found = (
            ["none", "", ""]
            if top is None
            else [str(top["batch"]), f"{top['speed']:.2f}", f"{top['speed'] / best:.3f}"]
        )
        table.append([workload, method, *found, tried])
    return table


def render(table: Table, *, markdown: bool) -> str:
    """As Markdown, or in columns."""
    if markdown:
        head, *rows = ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in table]
        return "\n".join([head, "|" + "---|" * len(table[0]), *rows])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table)
    return "\n".join(line.rstrip() for line in lines)


def _is_base(record: Record) -> bool:
    return str(record["method"]).startswith("ideal+")


def _row(record: Record) -> str:
    head = record["method"].partition(":")[0].removeprefix("ideal+")
    return f"{head}-budget" if head in COMPILED else record["method"]


def _better(one: Record, other: Record, budget: int) -> Record:
    """Of two measurements the faster that fits, or the one that comes closest."""
    done = [record for record in (one, other) if record["status"] == "ok"]
    fitting = [record for record in done if fits(record, budget)]
    if fitting:
        return max(fitting, key=lambda record: record["fraction"])
    return min(done, key=lambda record: record["reserved"]) if done else one


def _best(rows: Mapping[str, Mapping[int, Record]], budget: int, like: Record) -> Record | None:
    """The fastest that fits, of those that are compiled or of those that are not, as `like` is."""
    found = (row[budget] for row in rows.values() if budget in row)
    fitting = [record for record in found if record["method"] != "ideal" and fits(record, budget)]
    same = [record for record in fitting if bool(record["compiled"]) == bool(like["compiled"])]
    return max(same, key=lambda record: record["fraction"], default=None)


def _losses(records: Iterable[Record]) -> str:
    differences = [record["loss_difference"] for record in records if record["status"] == "ok"]
    if not differences:
        return ""
    return f"within {max(differences):.1e}" if max(differences) else "equal"


def _with_error(predicted: float | None, measured: float, unit: float, form: str) -> str:
    return f"{predicted / unit:{form}} ({predicted / measured - 1:+.1%})" if predicted and measured else ""


def _errors(errors: Sequence[float]) -> list[str]:
    if not errors:
        return ["", ""]
    return [f"{median(abs(error) for error in errors):.1%}", f"{max(errors, key=abs):+.1%}"]
