"""The ways by which GPU memory can go to a drive: which are possible, and which is taken. Pure functions.

``host``    through pinned memory and O_DIRECT; one slot is copied on the link while another is on the drive
``gds``     directly, by cuFile and the kernel module nvidia-fs
``p2pdma``  directly, by cuFile and the kernel's own PCI P2PDMA
``compat``  through kvikio's bounce buffers, which copy and write by turns; measured by the probe, never taken
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch_tiers.allocator.errors import TiersError
from torch_tiers.allocator.nvme.facts import P2PDMA_VARIABLE, Machine, Place
from torch_tiers.allocator.sizes import MiB, format_size

Gds = Literal["require", "prefer", "off"]
Way = Literal["host", "gds", "p2pdma", "compat"]
Direct = Literal["gds", "p2pdma"]

DIRECT: tuple[Direct, ...] = ("gds", "p2pdma")
NAMES: dict[Way, str] = {
    "host": "through host memory",
    "gds": "direct, by nvidia-fs",
    "p2pdma": "direct, by PCI P2PDMA",
    "compat": "by kvikio's bounce buffers",
}
SLOTS, SLOT_BYTES = 4, 16 * MiB
"""Of a ring of staging slots: at 10 GB/s a drive is through with four in 7 ms, and a copy into one takes 20 us."""
RINGS = 2 * SLOTS * SLOT_BYTES
"""What is registered with cuFile of a GPU's memory, for both directions; other devices address it through BAR1."""
RING = SLOTS * SLOT_BYTES
"""What a way is timed with."""
ENOUGH = 0.95
"""Of the speed of ``host``, with which a direct way wins: it spares host memory and its bandwidth."""

_FILESYSTEMS = ("ext4", "xfs")
_KERNEL = (6, 2)
_DRIVER = 565
_GPUS = re.compile(r"\b(A100|A40|L4|L40S|H100|H200|B100|B200|B300)\b")
_REGISTRY = 'load the module nvidia with NVreg_RegistryDwords="RMForceStaticBar1=1;RmForceDisableIomapWC=1;"'
_ALL_THE_SAME = 'nvme.gds = "require" takes the direct way all the same'


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a way is not possible, and the setting that would change that; empty if none would."""

    reason: str
    change: str = ""

    def __str__(self) -> str:
        return f"{self.reason}; {self.change}" if self.change else self.reason


@dataclass(frozen=True, slots=True)
class Speeds:
    """Bytes per second of a way: writing alone, reading alone, and the sum of both at once."""

    write: float
    read: float
    both: float


Measured = Speeds | str
"""The speeds of a way, or why it has none."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The way that a directory's GPU memory takes.

    Attributes
    ----------
    way
        The way.
    write, read
        Its bytes per second, where they were measured.
    why_not
        Why it is not direct; None if it is.
    change
        The one setting that would change that.
    """

    way: Way
    write: float | None = None
    read: float | None = None
    why_not: str | None = None
    change: str = ""

    @property
    def direct(self) -> bool:
        """Whether host memory is spared."""
        return self.way in DIRECT


def obstacle(way: Direct, machine: Machine, place: Place | None = None) -> Obstacle | None:
    """The first obstacle to a direct way, or None; without `place`, only those of the machine."""
    found = _of_cufile(machine)
    if found is None and place is not None:
        found = _of_place(place)
    if found is None:
        found = _of_nvidia_fs(machine, place) if way == "gds" else _of_p2pdma(machine, place)
    return found


def obstacles(machine: Machine, place: Place | None = None) -> dict[Direct, Obstacle | None]:
    """The obstacle to each direct way, or None."""
    return {way: obstacle(way, machine, place) for way in DIRECT}


def closed(possible: Mapping[Direct, Obstacle | None]) -> Obstacle | None:
    """The obstacle to both direct ways, or None if one is open."""
    gds, p2pdma = possible["gds"], possible["p2pdma"]
    if gds is None or p2pdma is None:
        return None
    if gds == p2pdma:
        return gds
    return Obstacle(f"{gds.reason}, and without it {p2pdma.reason}", gds.change or p2pdma.change)


def choose_way(possible: Mapping[Direct, Obstacle | None], measured: Mapping[Way, Measured], gds: Gds) -> Choice:
    """Choose for one directory.

    Parameters
    ----------
    possible
        What closes each direct way; None if it is open.
    measured
        What a measurement of each way gave; those that are not in it were not measured.

    Raises
    ------
    TiersError
        If `gds` is ``"require"`` and no direct way is to be had; says why.
    """
    host = _speeds(measured.get("host"))
    if gds == "off":
        return _host(host, Obstacle('nvme.gds is "off"', 'set nvme.gds to "prefer"'))
    best, refused = _best(possible, measured)
    if best is None:
        if gds == "require":
            change = f"; {refused.change}" if refused.change else ""
            raise TiersError(f'nvme.gds = "require" cannot be met ({refused.reason}){change}; "prefer" works without')
        return _host(host, refused)
    speeds = _speeds(measured[best]) if best in measured else None
    if gds == "prefer":
        if speeds is None:
            return _host(host, Obstacle("it has not been measured"))
        if host is not None and speeds.both < ENOUGH * host.both:
            slower = f"{best} moves {_rate(speeds.both)} both ways at once, host memory {_rate(host.both)}"
            return _host(host, Obstacle(slower, _ALL_THE_SAME))
    return Choice(best, *((speeds.write, speeds.read) if speeds else ()))


def choose_all(
    found: Mapping[Path, tuple[Mapping[Direct, Obstacle | None], Mapping[Way, Measured]]], gds: Gds
) -> dict[Path, Choice]:
    """Choose for the directories of one store: either all take the same direct way, or none takes one.

    Parameters
    ----------
    found
        What closes the direct ways, and what was measured, of each directory.

    Raises
    ------
    TiersError
        As `choose_way`, if it concerns any of them.
    """
    choices: dict[Path, Choice] = {}
    for path, (possible, measured) in found.items():
        try:
            choices[path] = choose_way(possible, measured, gds)
        except TiersError as error:
            raise TiersError(f"nvme at {path}: {error}") from None
    if {choice.way for choice in choices.values()} == {*DIRECT}:
        # cuFile's parameters are one for a process; nvidia-fs serves what PCI P2PDMA does, and md as well.
        barred = Obstacle("other directories go by nvidia-fs", "load nvidia-fs for all of them or for none")
        choices = {
            path: choose_way({"gds": possible["gds"], "p2pdma": barred}, measured, gds)
            for path, (possible, measured) in found.items()
        }
    barring = {path for path, (possible, _) in found.items() if closed(possible)}
    barring = barring or {path for path, choice in choices.items() if not choice.direct}
    if gds == "off" or not barring or len(barring) == len(choices):
        return choices
    odd = next(path for path in choices if path in barring)
    why = Obstacle(f"all directories must, and {odd} does not: {choices[odd].why_not}", choices[odd].change)
    none: dict[Direct, Obstacle | None] = {"gds": why, "p2pdma": why}
    return {
        path: choice if path in barring else choose_way(none, found[path][1], gds) for path, choice in choices.items()
    }


def _best(
    possible: Mapping[Direct, Obstacle | None], measured: Mapping[Way, Measured]
) -> tuple[Direct | None, Obstacle]:
    """The fastest direct way that is open and was not found to fail, and why there is none."""
    refused = closed(possible) or Obstacle("")
    best: Direct | None = None
    fastest = -1.0
    for way in DIRECT:
        if possible[way] is not None:
            continue
        found = measured.get(way)
        if isinstance(found, str):
            refused = Obstacle(found)
            continue
        both = found.both if found is not None else 0.0
        if both > fastest:
            best, fastest = way, both
    return best, refused


def _host(speeds: Speeds | None, why: Obstacle) -> Choice:
    write, read = (speeds.write, speeds.read) if speeds else (None, None)
    return Choice("host", write, read, why.reason, why.change)


def _speeds(measured: Measured | None) -> Speeds | None:
    return measured if isinstance(measured, Speeds) else None


def _rate(speed: float) -> str:
    return f"{speed / 1e9:.1f} GB/s"


def _of_cufile(machine: Machine) -> Obstacle | None:
    """What both direct ways need of the machine."""
    if machine.gpu is None:
        return Obstacle("no CUDA device")
    if machine.wsl:
        return Obstacle("WSL has no direct way to drives", "run Linux itself")
    if machine.kvikio is None:
        return Obstacle("kvikio is not installed", "pip install '.[cuda13]' (or cuda12)")
    if not machine.cufile:
        return Obstacle("libcufile is not found", "pip install nvidia-cufile")
    if machine.forced:
        return Obstacle(f"{machine.forced} forces bounce buffers", f"unset {machine.forced}")
    if not machine.udev:
        return Obstacle("/run/udev cannot be read", "start the container with --volume /run/udev:/run/udev:ro")
    if "GeForce" in machine.gpu.name:
        return Obstacle(f"{machine.gpu.name} is no GPU of a data centre or workstation")
    if machine.gpu.bar1 is not None and machine.gpu.bar1 < RINGS:
        small = f"BAR1 of {format_size(machine.gpu.bar1)} is less than the {format_size(RINGS)} that go through it"
        return Obstacle(small, "switch resizable BAR on in the BIOS")
    return None


def _of_place(place: Place) -> Obstacle | None:
    """What both need of the directory."""
    if place.kind not in _FILESYSTEMS:
        return Obstacle(f"cuFile has no direct way to {place.kind}", "name a directory on ext4 or xfs")
    for option in ("data=journal", "data=writeback"):
        if place.kind == "ext4" and option in place.options:
            return Obstacle(f"ext4 is mounted with {option}", "mount it with data=ordered")
    if not place.direct:
        return Obstacle("the directory does not take O_DIRECT", "name a directory on ext4 or xfs")
    if place.raid is None and not (place.drive or "").startswith("nvme"):
        return Obstacle(f"{place.drive or 'what lies below'} is no NVMe drive", "name a directory on an NVMe drive")
    return None


def _of_nvidia_fs(machine: Machine, place: Place | None) -> Obstacle | None:
    if not machine.nvidia_fs:
        return Obstacle("the kernel module nvidia-fs is not loaded", "load it: modprobe nvidia-fs")
    if place is not None and place.raid not in (None, "raid0"):
        return Obstacle(f"nvidia-fs does not serve md {place.raid}", "name a directory on each drive in nvme.paths")
    return None


def _of_p2pdma(machine: Machine, place: Place | None) -> Obstacle | None:
    assert machine.gpu is not None
    numbers = re.match(r"(\d+)\.(\d+)", machine.kernel)
    if numbers is None or tuple(map(int, numbers.groups())) < _KERNEL:
        return Obstacle(f"the kernel is {machine.kernel or 'unknown'}", "boot Linux 6.2 or newer")
    if machine.p2pdma is None:
        return Obstacle("/proc/kallsyms does not tell whether the kernel has PCI P2PDMA", "make it readable")
    if not machine.p2pdma:
        return Obstacle("the kernel has no PCI P2PDMA", "boot a kernel with CONFIG_PCI_P2PDMA=y")
    if not machine.open_modules:
        return Obstacle("the driver's kernel modules are not the open ones", "install NVIDIA's open kernel modules")
    if machine.driver is None or int(machine.driver.partition(".")[0]) < _DRIVER:
        return Obstacle(f"the driver is {machine.driver or 'unknown'}", f"install driver {_DRIVER} or newer")
    if not _GPUS.search(machine.gpu.name):
        return Obstacle(f"PCI P2PDMA is not supported on {machine.gpu.name}")
    if not machine.static_bar1:
        return Obstacle("the driver does not map all of HBM for other devices", _REGISTRY)
    if machine.multipath:
        return Obstacle("NVMe multipath is on", "boot with nvme_core.multipath=N")
    if machine.p2pdma_off:
        return Obstacle(f"{P2PDMA_VARIABLE} switches PCI P2PDMA off", f"unset {P2PDMA_VARIABLE}")
    if place is not None and place.raid is not None:
        return Obstacle(f"PCI P2PDMA does not serve md {place.raid}", "name a directory on each drive in nvme.paths")
    return None
