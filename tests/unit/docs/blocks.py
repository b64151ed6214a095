"""The blocks of commands on a page, and whether they are to be run here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

MARKERS = ("needs a GPU", "example")
"""What a comment before a block may say: that it is not run without a GPU, or never."""
_COMMENT = re.compile(r"<!--\s*(.*?)\s*-->")
INDENT = "    "


@dataclass(frozen=True)
class Block:
    """Lines that are indented by four spaces.

    Attributes
    ----------
    line
        The number of its first line, from 1.
    marker
        What the comment before it says; None without one.
    """

    line: int
    lines: tuple[str, ...]
    marker: str | None

    @property
    def commands(self) -> list[tuple[str, str | None]]:
        """Each command, with what it prints where the page shows that: the lines after one that begins with ``$``."""
        if not any(line.startswith("$ ") for line in self.lines):
            return [("\n".join(self.lines), None)]
        found: list[tuple[str, str | None]] = []
        for line in self.lines:
            if line.startswith("$ "):
                found.append((line[2:], None))
            else:
                assert found, f"line {self.line}: the output comes before a command"
                command, output = found[-1]
                if output is None and command.endswith("\\"):
                    found[-1] = (f"{command}\n{line}", None)
                else:
                    found[-1] = (command, line if output is None else f"{output}\n{line}")
        return found


def blocks(page: str) -> list[Block]:
    """The blocks of a page.

    Raises
    ------
    ValueError
        If a comment is no marker, or no block follows it; or a block is fenced: those are not looked at.
    """
    return list(_blocks(page.splitlines()))


def _blocks(lines: list[str]) -> Iterator[Block]:
    marker, marked, number = None, 0, 0
    while number < len(lines):
        line = lines[number]
        if line.startswith(INDENT) and (number == 0 or not lines[number - 1].strip()):
            end = number
            while end < len(lines) and (lines[end].startswith(INDENT) or not lines[end].strip()):
                end += 1
            inner = [line[len(INDENT) :] for line in lines[number:end]]
            while not inner[-1].strip():
                inner.pop()
            yield Block(number + 1, tuple(inner), marker)
            marker, number = None, end
            continue
        number += 1
        if not line.strip():
            continue
        if marker is not None:
            raise ValueError(f"line {marked}: no block follows the marker {marker!r}")
        if line.lstrip().startswith("```"):
            raise ValueError(f"line {number}: indent the block by four spaces, it is not run otherwise")
        if "<!--" in line:
            found = _COMMENT.fullmatch(line)
            if found is None or found[1] not in MARKERS:
                raise ValueError(f"line {number}: a comment is one of {MARKERS}")
            marker, marked = found[1], number
    if marker is not None:
        raise ValueError(f"line {marked}: no block follows the marker {marker!r}")


def is_shown(output: str, printed: str) -> bool:
    """Whether a command printed what a page shows of it: ``...`` stands for anything, and all white space is alike."""
    parts = [re.escape(" ".join(part.split())) for part in output.split("...")]
    return re.fullmatch(r"\s*.*?\s*".join(parts), " ".join(printed.split()), re.DOTALL) is not None
