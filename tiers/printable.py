"""Text of others, such as names of files and programs, made fit for a terminal: it can fake no line and no colour."""

from __future__ import annotations

import re
import sys

# What moves the cursor, rings, or begins a sequence (C0, DEL, C1), ends a line, or turns the direction of writing; and
# halves of characters, as names that are no UTF-8 have them, which cannot be printed.
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""`text` in one line, with every character that controls a terminal as Python writes it: ``\x1b``."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def complain(error: Exception) -> None:
    """Say in one line on stderr what ends us."""
    print(f"tiers: {printable(str(error))}", file=sys.stderr)
