"""What holds today? `RESULTS.md`, made of the results of all reports and of the newest data, and README's speeds.

``python -m benchmarks.results``
``python -m benchmarks.results --zoo DIR/results.json`` first takes over what `benchmarks.zoo` measured.

A report in ``reports/`` has the question as its title and the answer in its first section. A line ``<!-- NAME -->``
there is where a table of ``data/`` goes, of `TABLES`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from benchmarks import speeds
from benchmarks.contention.report import NONE, WHAT, Cell, middle, of_plain
from torch_tiers.allocator.sizes import GiB

HERE = Path(__file__).parent
PAGE = HERE / "RESULTS.md"
README = HERE.parent / "README.md"
PICTURE = HERE / "speeds.svg"
ORDER = (
    "zoo fractions compiled largest room predictions contention lanes drives streaming step host requests coverage "
    "faults"
)
HEAD = """# Results

What holds today, question by question. `python -m benchmarks.results` makes this page of [reports/](reports) and
[data/](data); how a figure was measured, and what is not shown, is told there. Dates are of 2026.
"""
Table = list[list[str]]
"""The head, and the rows."""


def contention() -> Table:
    """A row a sitting and load; what is compared is told as without / with the monitor."""
    table = [["budget, day", "load", "training", "preprocessing", "training, with / without", "GiB moved a step"]]
    for path in sorted((HERE / "data").glob("contention_*.json")):
        found = json.loads(path.read_text())
        names = {field.name for field in fields(Cell)}
        cells = [Cell(**{name: v for name, v in cell.items() if name in names}) for cell in found["cells"]]
        for load in dict.fromkeys(cell.load for cell in cells):
            (off, on), prep = ([of_plain(cells, load, variant, what) for variant in ("off", "on")] for what in WHAT)
            moved = [middle(cells, load, (variant,), "moved") / GiB for variant in ("off", "on")]
            row = [f"{found['options']['hbm']}, {found['when'][5:]}", load, f"{off:.3f} / {on:.3f}"]
            row += ["" if load == NONE else f"{prep[0]:.3f} / {prep[1]:.3f}", f"{on / off:.3f}"]
            table.append([*row, f"{moved[0]:.1f} / {moved[1]:.1f}"])
    return table


TABLES: dict[str, Callable[[], Table]] = {"contention": contention, "zoo": lambda: speeds.shown(speeds.load())}


def readme(text: str) -> str:
    """README with its table of speeds as the data have it: the lines from the table's head to the one that is none."""
    table = render(speeds.claims(speeds.load()))
    head, found, rest = text.partition(table.partition("\n")[0] + "\n")
    if not found:
        raise ValueError("README has no table that begins as that of benchmarks/speeds.py does")
    lines = rest.split("\n")
    while lines and lines[0].startswith("|"):
        lines.pop(0)
    return "\n".join([head + table, *lines])


def page() -> str:
    """The whole of it."""
    parts = []
    for name in ORDER.split():
        title, _, rest = (HERE / "reports" / f"{name}.md").read_text().partition("\n")
        result = re.sub(r"<!-- (\w+) -->", _table, rest.partition("## Result\n")[2].partition("\n## ")[0])
        parts.append(f"#{title}\n\n{result.strip()}\n\n[Report](reports/{name}.md)\n")
    titles = [part.partition("\n")[0].removeprefix("## ") for part in parts]
    links = [f"- [{title}](#{re.sub(r'[^a-z0-9 -]', '', title.lower()).replace(' ', '-')})" for title in titles]
    return "\n".join([HEAD, *links, "", *parts])


def _table(found: re.Match[str]) -> str:
    return render(TABLES[found[1]]())


def render(table: Table) -> str:
    """As Markdown."""
    head, *rows = ("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in table)
    return "\n".join([head, "|" + "---|" * len(table[0]), *rows])


def main(words: list[str] | None = None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results", description=__doc__)
    parser.add_argument("--zoo", type=Path, metavar="FILE", help="results of benchmarks.zoo to take over")
    options = parser.parse_args(words)
    if options.zoo is not None:
        speeds.take_over(options.zoo)
    PAGE.write_text(page())
    README.write_text(readme(README.read_text()))
    PICTURE.write_text(speeds.picture(speeds.load()))


if __name__ == "__main__":
    main()
