"""What verbs read that look at a run afterwards: files of its directory, and the links of this machine."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from torch_tiers.allocator.sizes import MiB, format_size
from torch_tiers.cli.verb import CliError
from torch_tiers.config import load
from torch_tiers.migrator.model import trace_json
from torch_tiers.migrator.model.links import LANES, Links, links_from
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.planning.corrections import corrected
from torch_tiers.planning.ranks import slowest
from torch_tiers.planning.stats import stats_from_json
from torch_tiers.run_directory import STATS, TRACE

MOST_UNPACKED = 256 * MiB
"""Bytes of a file, unpacked: those of the longest iteration that is recorded are a fifth of that."""

_PART = 1 * MiB

Content = TypeVar("Content")


def read_json(file: Path, parse: Callable[[str], Content]) -> Content:
    """Read a file of a run directory, or a compressed one. No more than `MOST_UNPACKED` bytes of it are taken.

    Raises
    ------
    CliError
        If there is none, or `parse` does not take it.
    """
    try:
        return parse(_unpacked(file).decode("utf-8"))
    except FileNotFoundError:
        several = [str(other.parent) for other in file.parent.glob(f"*/{file.name}")]
        if several:
            names = ", ".join(sorted(several, key=lambda name: (len(name), name)))  # rank2 before rank10
            if not all(re.fullmatch(r"(rank|process)\d+", Path(name).name) for name in several):
                raise CliError(f"{file.parent} is no run, but holds some; name one of {names}") from None
            raise CliError(f"{file.parent} holds a directory for each process; name one of {names}") from None
        raise CliError(
            f"{file} does not exist; run with TIERS_RUN={file.parent} to have it written, at the end of a program that "
            "trains: without a training step, or after SIGKILL, there is none"
        ) from None
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise CliError(
            f"{file} cannot be read: {error}; name a directory that TIERS_RUN named, whose run this version wrote"
        ) from None


def ranks_of(directory: Path) -> dict[str, Path]:
    """The directories of a run's ranks by their names, in order; none where it left no such, or is a rank's itself."""
    if (directory / STATS).exists():
        return {}
    found = [path.parent for path in directory.glob(f"rank*/{STATS}") if path.parent.name[4:].isdecimal()]
    return {path.name: path for path in sorted(found, key=lambda path: int(path.name[4:]))}


def slowest_rank(directory: Path) -> tuple[Path, dict[str, dict[str, Any]]]:
    """The directory of the slowest rank, and the numbers of all by name; of a run of one process it is `directory`."""
    ranks = ranks_of(directory)
    stats = {name: read_json(path / STATS, stats_from_json) for name, path in ranks.items()}
    return (ranks[slowest(stats)] if stats else directory), stats


def _unpacked(file: Path) -> bytes:
    """What a file holds. A small one may unpack to more than there is memory, so that is seen on the way."""
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
        parts: list[bytes] = []
        left = MOST_UNPACKED + 1
        while left and (part := stream.read(min(_PART, left))):
            parts.append(part)
            left -= len(part)
    if not left:
        raise ValueError(f"it holds more than {format_size(MOST_UNPACKED)}, and no run writes as much")
    return b"".join(parts)


def known_links(
    given: Mapping[str, float],
    *,
    disk: bool = False,
    direct: bool | None = None,
    below: int | None = None,
    dram: int | None = None,
) -> Links:
    """The links as `given`, and else as tiers.toml has them; with `disk`, those of a drive even where it has none.

    `direct` says whether a drive is reached past the host's memory; None: if both of its links are known.
    `below` is what the tiers at their other end hold, `dram` what of that DRAM does.
    """
    config = load(trains=False).config
    rates = {lane: given.get(lane) or asdict(config.links)[lane] for lane in LANES}
    has = {}
    for out, back in (("disk_write", "disk_read"), ("gds_write", "gds_read")):
        if bool(rates[out]) != bool(rates[back]):
            raise CliError(f"the links of a drive are two: give both {out} and {back}")
        has[out] = bool(rates[out])
    if direct is None:
        direct = has["gds_write"]
    return links_from(rates, disk=disk or direct or has["disk_write"], direct=direct, below=below, dram=dram)


def trace_and_links(path: Path, rates: Mapping[str, float], dram: int | None) -> tuple[Trace, Links, int | None]:
    """A trace, or that of a run directory; the links, as far as `rates` gives them; bytes below HBM, if known.

    The links of a run directory are corrected as that run measured. With any of `rates` they are not.
    """
    stats: dict[str, Any] = {}
    if path.is_dir():
        path = slowest_rank(path)[0]
        if not rates and (path / STATS).is_file():
            stats = read_json(path / STATS, stats_from_json)
    trace = read_json(path if path.suffix in (".json", ".gz") else path / TRACE, trace_json.read)
    below, dram = known_below(dram)
    has_disk = below is not None and dram is not None and below > dram
    return trace, corrected(known_links(rates, disk=has_disk, below=below, dram=dram), stats), below


def known_below(dram: int | None) -> tuple[int | None, int | None]:
    """Bytes that the tiers below HBM hold, and those of `dram`, or what of it is configured; None if neither says."""
    config = load(trains=False).config
    dram = config.dram.capacity if dram is None else dram
    nvme = (config.nvme.capacity or 0) if config.nvme.paths else 0
    return (None, None) if dram is None else (dram + nvme, dram)
