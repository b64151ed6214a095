"""A file of the configuration: what it says, and whether anybody but this user can have written it.

``./tiers.toml`` is that of whatever directory a program is started in, so a file may be anybody's, and about anything.
"""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_tiers.allocator.private import is_ours
from torch_tiers.config_keys import ConfigError

LARGEST = 64 << 10  # bytes, where a file that sets every key has one thousand
DOTS = 16  # of keys and numbers on a line; each part of a key costs tomllib memory for all parts before it
LONGEST = 1000  # characters of a number or a name: Python writes no longer numbers down, as our messages do
DEPTH = 16  # of brackets within brackets, each of which costs tomllib some levels of Python's stack

# As TOML has it, also where something is not closed; a text of several lines may end in quotes of its own.
_TEXT_OR_COMMENT = re.compile(
    r'"""(?:\\.?|[^\\])*?(?:"{3,5}|\Z)'
    r"|'''.*?(?:'{3,5}|\Z)"
    r'|"(?:\\.?|[^"\\\n])*"?'
    r"|'[^'\n]*'?"
    r"|#[^\n]*",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class File:
    """What was read.

    Attributes
    ----------
    text
        All of it.
    not_ours
        Why somebody else may have written it, and what to do about that; None if nobody can have.
    """

    text: bytes
    not_ours: str | None


NO_FILE = File(b"", None)


def read(path: Path, origin: str) -> File:
    """Read a file of the configuration.

    Raises
    ------
    OSError
        If it cannot be read.
    ConfigError
        If it is larger than any configuration.
    """
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        text = file.read(LARGEST + 1)
    if len(text) > LARGEST:
        raise ConfigError(f"{origin} is larger than {LARGEST >> 10} KiB, as no configuration is; correct it")
    # A link is followed, but who made it has chosen among all files.
    if path.lstat().st_uid != os.geteuid() or found.st_uid != os.geteuid():
        return File(text, "belongs to another user: set it in a file of your own")
    if not is_ours(found):
        return File(text, f"others may write to: chmod go-w {shlex.quote(str(path))}")
    return File(text, None)


def parse(text: bytes, origin: str) -> dict[str, Any]:
    """What TOML makes of `text`; ConfigError if it is none, or would take tomllib more than it can be worth."""
    try:
        decoded = text.decode("utf-8")
        _refuse_what_is_costly(decoded, origin)
        return tomllib.loads(decoded)
    except ValueError as error:  # TOMLDecodeError is one, and there are others, such as that of an endless number
        raise ConfigError(f"{origin} cannot be read: {error}; correct it") from error


def _refuse_what_is_costly(text: str, origin: str) -> None:
    # As many line ends as before: a line that is told must be found.
    bare = _TEXT_OR_COMMENT.sub(lambda found: "\n" * found[0].count("\n"), text)
    depth = 0
    for number, line in enumerate(bare.split("\n"), start=1):
        if line.count(".") > DOTS:
            raise ConfigError(f"{origin}: line {number} has a name of more parts than any key; correct it")
        if max(map(len, re.split(r"[\s=,\[\]{}]", line))) > LONGEST:
            raise ConfigError(f"{origin}: line {number} has a longer name or number than any value; correct it")
        for bracket in re.findall(r"[\[\]{}]", line):
            depth = depth + 1 if bracket in "[{" else max(depth - 1, 0)
            if depth > DEPTH:
                raise ConfigError(f"{origin}: line {number} is nested deeper than any value; correct it")
