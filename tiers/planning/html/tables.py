"""Tables and lines for a terminal, as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from rich.console import RenderableType
from rich.table import Table

from torch_tiers.printable import printable

MOST_ROWS = 200  # of a table, and lines between them
MOST_CHARACTERS = 400  # of a cell or a line


def plain(text: object) -> str:
    """Return text as HTML, in one line, and the beginning of it if it is long."""
    shown = printable(str(text))
    return escape(shown if len(shown) <= MOST_CHARACTERS else f"{shown[:MOST_CHARACTERS]}...")


def html(parts: Iterable[RenderableType]) -> Iterator[str]:
    """Return what a terminal is shown as HTML; of what is long, the beginning."""
    lines = 0
    for part in parts:
        if isinstance(part, Table):
            yield from _table(part)
        elif (lines := lines + 1) <= MOST_ROWS:
            yield f"<p>{plain(part)}</p>"
    if lines > MOST_ROWS:
        yield f"<p>and {lines - MOST_ROWS} lines more, which tiers report prints</p>"


def _table(table: Table) -> Iterator[str]:
    yield "<table>"
    if table.title:
        yield f"<caption>{plain(table.title)}</caption>"
    yield f"<tr>{''.join(f'<th>{plain(column.header)}</th>' for column in table.columns)}</tr>"
    rows = [*zip(*(column.cells for column in table.columns), strict=True)]
    for row in rows[:MOST_ROWS]:
        yield f"<tr>{''.join(f'<td>{plain(cell)}</td>' for cell in row)}</tr>"
    yield "</table>"
    if len(rows) > MOST_ROWS:
        yield f"<p>and {len(rows) - MOST_ROWS} rows more, which tiers report prints</p>"
