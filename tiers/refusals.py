"""How a program is ended, or told something, before it trains. Imports next to nothing: `import torch` comes here."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from torch_tiers.allocator.errors import TiersError

TOLD = "_TIERS_TOLD"  # a variable: what this process starts inherits what was told along with the reason for it


def give_up(error: TiersError) -> NoReturn:
    """End the program with code 2 and one line on stderr; where somebody types, raise: their session is theirs.

    Raises
    ------
    SystemExit
        In a program.
    TiersError
        In a notebook or at a prompt.
    """
    from torch_tiers.printable import complain

    if is_interactive():
        raise error
    complain(error)
    raise SystemExit(2) from None


def is_interactive() -> bool:
    """Whether somebody types what runs: IPython and notebooks, Python's prompt, or ``python -i``."""
    import builtins

    return hasattr(builtins, "get_ipython") or hasattr(sys, "ps1") or bool(sys.flags.interactive)


def is_new(text: str) -> bool:
    """Whether no process that led to this one has told the same, as a launcher has to its ranks and they to workers."""
    told = os.environ.get(TOLD, "").splitlines()
    if text in told:
        return False
    os.environ[TOLD] = "\n".join([*told, text])
    return True
