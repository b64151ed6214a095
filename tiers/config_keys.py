"""Every key of the configuration, declared once: its name in tiers.toml, its variable, what it accepts."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from torch_tiers.allocator.errors import TiersError
from torch_tiers.allocator.sizes import Share, parse_share, parse_size
from torch_tiers.log import LEVELS
from torch_tiers.migrator.policies import MODULES

ALLOCATORS = ("off", "torch", "pages")
USUAL_ALLOCATOR: Literal["pages"] = "pages"  # of who asks for tiers and configures none, by whatever way
GDS_MODES = ("require", "prefer", "off")
KNOWN_POLICIES = tuple(MODULES)


class ConfigError(TiersError):
    """A wrong configuration: the text names the key, where its value came from and what is accepted."""


@dataclass(frozen=True, slots=True)
class Parser:
    """Turns a raw value (text of a variable, a TOML value, a Python argument) into a typed one.

    Attributes
    ----------
    parse
        Raises ValueError or TypeError on what it does not accept.
    accepts
        What it accepts, in words for an error message.
    choices
        All that it accepts, where that is a few words.
    """

    parse: Callable[[object], object]
    accepts: str
    choices: tuple[str, ...] = ()

    def guess(self, raw: object) -> str:
        """``"; did you mean x?"`` for the accepted text nearest to `raw`, or nothing when none is near."""
        return nearest(str(raw), self.choices)


@dataclass(frozen=True, slots=True)
class Key:
    """One key.

    Attributes
    ----------
    name
        As in tiers.toml: ``hbm.capacity`` is ``capacity`` of the table ``[hbm]``.
    parser
        What the key accepts.
    env
        The environment variable, if the key has one.
    guarded
        Whether it can destroy what is there, or weaken what protects it: a file may say that only if nobody but this
        user can have written it.
    leads
        Whether it names what is written or read: so may ``./tiers.toml``, which nobody has named. A file that the user
        has named may be another's.
    """

    name: str
    parser: Parser
    env: str | None = None
    guarded: bool = False
    leads: bool = False

    @property
    def argument(self) -> str:
        """The name as a Python argument and, with dashes, as an option: ``hbm``, ``nvme_path``."""
        if self.env is not None:
            return self.env.removeprefix("TIERS_").lower()
        return self.name.replace(".", "_")


def nearest(name: str, known: Iterable[str]) -> str:
    """``"; did you mean x?"`` for the known name nearest to `name`, or nothing when none is near."""
    names = sorted(known)
    # `hbm` for `hbm.capacity` is the likeliest slip, though the two are far apart as strings.
    match = [other for other in names if other.startswith(name + ".")] or get_close_matches(name, names, n=1)
    return f"; did you mean {match[0]}?" if match else ""


def _size(raw: object) -> int:
    if not isinstance(raw, (str, int)):
        raise TypeError("not a size")
    return parse_size(raw)


def _budget(raw: object) -> int | Share | None:
    if not isinstance(raw, str):
        return _size(raw)
    return None if raw.strip().lower() == "all" else parse_share(raw) or _size(raw)


def _flag(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    text = str(raw).strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise ValueError("not a flag")


SLOWEST = 1e6  # bytes per second: a smaller number was meant to be GB/s


def bytes_a_second(raw: object) -> float:
    """Read a bandwidth; ValueError or TypeError if it is none."""
    if isinstance(raw, bool) or not isinstance(raw, (int, float, str)):
        raise TypeError("not a number")
    rate = float(raw)
    if not (rate >= SLOWEST and math.isfinite(rate)):
        raise ValueError("not a rate")
    return rate


def _path(raw: object) -> Path:
    if not isinstance(raw, (str, os.PathLike)) or not str(raw).strip():
        raise TypeError("not a path")
    # Absolute from here on: the program may change its directory before the path is used.
    return Path(raw).expanduser().absolute()


def _paths(raw: object) -> tuple[Path, ...]:
    if isinstance(raw, str):
        raw = [part for part in raw.split(os.pathsep) if part.strip()]
    elif isinstance(raw, os.PathLike):
        raw = [raw]
    if not isinstance(raw, (list, tuple)):
        raise TypeError("not a list of paths")
    return tuple(_path(part) for part in raw)


def _one_of(choices: tuple[str, ...]) -> Parser:
    def parse(raw: object) -> str:
        text = str(raw).strip().lower()
        if text not in choices:
            raise ValueError("not a choice")
        return text

    return Parser(parse, "one of " + ", ".join(choices), choices)


SIZE = Parser(_size, 'a size such as "24GiB", "24GB" or a number of bytes, not negative')
BUDGET = Parser(_budget, f'{SIZE.accepts}; a share of what the program needs, such as "60%"; or "all"')
FLAG = Parser(_flag, "true or false (in the environment also 1 or 0)")
RATE = Parser(bytes_a_second, "bytes per second, at least 1e6: 55e9 for 55 GB/s")
PATH = Parser(_path, "a path")
PATHS = Parser(_paths, f"directories: a list, or one text with {os.pathsep!r} between them")

KEYS = (
    Key("allocator", _one_of(ALLOCATORS), "TIERS_ALLOCATOR"),
    Key("policy", _one_of(KNOWN_POLICIES), "TIERS_POLICY"),
    Key("hbm.capacity", BUDGET, "TIERS_HBM"),
    Key("hbm.strict", FLAG, "TIERS_HBM_STRICT"),
    Key("dram.capacity", SIZE, "TIERS_DRAM"),
    Key("nvme.capacity", SIZE, "TIERS_NVME"),
    Key("nvme.paths", PATHS, "TIERS_NVME_PATH", leads=True),
    Key("nvme.gds", _one_of(GDS_MODES)),
    Key("nvme.checksum", FLAG, guarded=True),
    Key("monitor.enabled", FLAG),
    Key("monitor.probe", FLAG),
    Key("monitor.calibration", PATH, leads=True),
    Key("links.d2h", RATE),
    Key("links.h2d", RATE),
    Key("links.disk_write", RATE),
    Key("links.disk_read", RATE),
    Key("links.gds_write", RATE),
    Key("links.gds_read", RATE),
    Key("replay", FLAG, "TIERS_REPLAY"),
    Key("plan_cache", FLAG, "TIERS_PLAN_CACHE"),
    Key("ledger", PATH, "TIERS_LEDGER", guarded=True),
    Key("run", PATH, "TIERS_RUN", leads=True),
    Key("run_force", FLAG, "TIERS_RUN_FORCE", guarded=True),
    Key("log", _one_of(LEVELS), "TIERS_LOG"),
)
# Names the file that the other keys come from, so it is no key of such a file.
CONFIG_ENV = "TIERS_CONFIG"

BY_NAME = {key.name: key for key in KEYS}
BY_ENV = {key.env: key for key in KEYS if key.env is not None}
BY_ARGUMENT = {key.argument: key for key in KEYS}
