"""The page: sections one below the other, in one file that asks for nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import RenderableType

from torch_tiers.planning.html.drawn import inline
from torch_tiers.planning.html.section import Section
from torch_tiers.planning.html.tables import html, plain

# What a browser fetches nothing by, even if a name in a file of a run were taken for a tag.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; background: #fff; max-width: 1000px; margin: 2em auto;
  padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin: 2em 0 .3em; border-bottom: 1px solid #ddd }
p { margin: .3em 0 } .answer { background: #f3f6fa; border-left: 4px solid #3b6fb6; padding: .6em 1em }
.answer p { font-size: 1.05em } nav a { margin-right: 1em } svg, img { max-width: 100%; height: auto }
table { border-collapse: collapse; margin: 1em 0 } caption { text-align: left; font-weight: 600 }
td, th { border: 1px solid #ddd; padding: .2em .6em; text-align: left } footer { margin-top: 3em; color: #777 }
"""


def page(
    title: str, answer: Iterable[str], sections: Sequence[Section], tables: Iterable[RenderableType]
) -> Iterator[str]:
    """Return the lines of the page with that title."""
    title = plain(title)
    yield "<!DOCTYPE html>"
    yield f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    yield f"<style>{_STYLE}</style></head><body>"
    yield f"<h1>{title}</h1>"
    yield '<section id="answer" class="answer">'
    yield from html(answer)
    yield "</section><nav>"
    yield from (f'<a href="#{each.name}">{plain(each.title)}</a>' for each in sections)
    yield '<a href="#tables">Tables</a></nav>'
    for each in sections:
        yield f'<section id="{each.name}"><h2>{plain(each.title)}</h2>'
        if each.figure is not None:
            yield inline(each.name, each.figure)
        yield from html(each.text)
        yield "</section>"
    yield '<section id="tables"><h2>Tables</h2>'
    yield from html(tables)
    yield "</section></body></html>"
