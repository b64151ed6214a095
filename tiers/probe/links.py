"""From a report to ``[links]`` of tiers.toml: the bandwidths that the planner and the monitor count on."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import tomlkit
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import AbstractTable

from torch_tiers.allocator.errors import TiersError
from torch_tiers.allocator.sizes import MiB
from torch_tiers.config import LinksConfig
from torch_tiers.probe.results import Report

LEAST = 16 * MiB
"""Copies from here on run at a link's full speed."""


def measured_links(report: Report) -> LinksConfig:
    """The peak of each lane over the sizes from `LEAST` on, in whole bytes per second; None if not measured.

    Of several GPUs the slowest counts, each with the NUMA node that is best for it: what is planned with one
    number must hold for all.
    """
    best: dict[str, dict[str, float]] = {}
    for result in report.results:
        peak = result.peak(LEAST)
        if result.path.lane is None or result.status != "measured" or peak is None:
            continue
        ends = (result.path.source, result.path.destination)
        gpu = next((end for end in ends if end.startswith("hbm")), "")
        of_lane = best.setdefault(result.path.lane, {})
        of_lane[gpu] = max(peak, of_lane.get(gpu, 0.0))
    return LinksConfig(**{lane: float(round(min(peaks.values()))) for lane, peaks in best.items()})


def written_links(path: Path) -> set[str]:
    """The keys that ``[links]`` of `path` has values for; none if there is no such file."""
    links = _read(path).get("links", {})
    return set(links) if isinstance(links, dict) else set()


def refuse_if_not_writable(path: Path) -> None:
    """Raise TiersError if `path` cannot be written or is no such file: asked before minutes are spent measuring."""
    if not isinstance(_read(path).get("links", {}), (AbstractTable, dict)):
        raise TiersError(f"{path}: links is not a table; correct it")
    parent = path.resolve().parent  # resolved, as below: the file is replaced where it is, within its directory
    if not os.access(parent, os.W_OK | os.X_OK):
        raise TiersError(f"{path} cannot be written: {parent} is not a directory that you may write to")


def refuse_to_overwrite(path: Path, lanes: Iterable[str]) -> None:
    """Raise TiersError if `path` has a value for one of `lanes`."""
    taken = sorted(written_links(path).intersection(lanes))
    if taken:
        raise TiersError(f"{path} has measured links already ({', '.join(taken)}); --force replaces them")


def write_links(path: Path, links: LinksConfig, *, force: bool) -> list[str]:
    """Put what was measured into ``[links]`` of `path` and leave every other character as it is.

    The file is replaced in one step, so nobody reads half of it. It is made if there is none.

    Returns
    -------
    list[str]
        The keys that were written.

    Raises
    ------
    TiersError
        If nothing was measured, a value would be overwritten without `force`, or the file cannot be read or
        written.
    """
    measured = {lane: int(value) for lane, value in asdict(links).items() if value is not None}
    if not measured:
        raise TiersError(
            f"nothing to write to {path}: no link was measured with {LEAST // MiB} MiB or more; have --paths name some "
            "of d2h, h2d, disk_write, disk_read, gds_write and gds_read, and tiers doctor say why one cannot run"
        )
    if not force:
        refuse_to_overwrite(path, measured)
    document = _read(path)
    if "links" not in document:
        document["links"] = tomlkit.table().comment("bytes per second, measured by: tiers probe --write")
    table = document["links"]
    if not isinstance(table, (AbstractTable, dict)):
        raise TiersError(f"{path}: links is not a table")
    for lane, value in measured.items():
        table[lane] = value
    try:
        _replace(path.resolve(), tomlkit.dumps(document))  # resolved: a link to the file stays one
    except OSError as error:
        raise TiersError(f"{path} cannot be written: {error.strerror}") from error
    return list(measured)


def _read(path: Path) -> tomlkit.TOMLDocument:
    try:
        return tomlkit.parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return tomlkit.document()
    except (OSError, UnicodeDecodeError, TOMLKitError) as error:
        raise TiersError(f"{path} cannot be read: {error}; correct it, or have TIERS_CONFIG name another") from error


def _replace(path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8", delete=False) as file:
        try:
            file.write(text)
            file.close()
            if path.exists():
                shutil.copymode(path, file.name)
            else:
                os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
