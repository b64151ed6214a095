"""What a verb is, and how it speaks: tables for people, ``--json`` for programs, one line for an error."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from torch_tiers.allocator.errors import TiersError
from torch_tiers.allocator.sizes import parse_size
from torch_tiers.printable import printable

BAD_INPUT = 2
FAILED = 1


class CliError(TiersError):
    """Ends a verb with one line on stderr.

    Parameters
    ----------
    text
        What happened and what to do.
    code
        The exit code; 2, bad input, unless there is a better one.
    """

    def __init__(self, text: str, code: int = BAD_INPUT) -> None:
        super().__init__(text)
        self.code = code


class Verb(Protocol):
    """One verb. Its name on the command line is `name`, its help the docstring of its class."""

    name: str

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the verb's arguments; ``--json`` is there already."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it and return the exit code; a TiersError becomes one line."""


def positive_seconds(text: str) -> float:
    """The type of an argument that is a time in seconds."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def size(text: str) -> int:
    """The type of an argument that is a number of bytes, such as ``24GiB``."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def print_json(data: object) -> None:
    """Write `data` on stdout; paths and such as their text."""
    with writing():
        # DEL is the one character that controls a terminal and is ASCII all the same.
        print(json.dumps(data, indent=2, default=str).replace("\x7f", "\\u007f"))


class Terminal(Console):
    """Writes on stdout what may be others' text, in colour where that is a terminal and NO_COLOR is not set."""

    def __init__(self) -> None:
        # No markup: a path or a hint such as torch-tiers[cuda13] is text, not a style.
        super().__init__(markup=False, highlight=False, emoji=False)

    def render_str(self, text: str, **how: Any) -> Text:
        """What every line, and every cell of a table, is made with, and measured."""
        return super().render_str(printable(text), **how)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Also for what comes as a Text."""
        if isinstance(renderable, Text) and (shown := printable(renderable.plain)) != renderable.plain:
            renderable = renderable.copy()
            renderable.plain = shown
        return super().render(renderable, options)


def print_tables(parts: Iterable[RenderableType]) -> None:
    """Write tables and lines on stdout."""
    console = Terminal()
    with writing():
        for part in parts:
            console.print(part)


@contextmanager
def writing() -> Iterator[None]:
    """End the verb in one line where stdout cannot be written, and silently where its reader left, as `head` does."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A name that the encoding lacks is written as its number: what else there is to say matters more.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
        print(end="", flush=True)
    except OSError as error:
        # What is still in the buffer would fail once more, with a traceback, when Python flushes it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise SystemExit(FAILED) from None
        raise CliError(f"stdout cannot be written: {error.strerror}", FAILED) from None
