"""What lies under a path: file system, device, kind of drive."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_VIRTUAL = ("vd", "xvd")  # drives of a hypervisor, which the kernel takes to spin whatever they are


@dataclass(frozen=True, slots=True)
class Drive:
    """A block device: the whole drive's name (``nvme0n1``, not its partition) and whether it spins, if known."""

    name: str
    rotational: bool | None


@dataclass(frozen=True, slots=True)
class Filesystem:
    """The file system that a path lies on.

    Attributes
    ----------
    kind, source
        As mounted: ``ext4``, ``/dev/nvme0n1p1``.
    drive
        The drive below, where the file system says which; overlay, network and memory file systems do not.
    """

    kind: str
    source: str
    drive: Drive | None

    @property
    def in_memory(self) -> bool:
        """Whether what is written here stays in memory."""
        return self.kind in _IN_MEMORY

    def describe(self) -> str:
        """One phrase: ``ext4 on nvme0n1 (solid state)``."""
        if self.drive is None:
            return f"{self.kind} on {self.source}"
        medium = {True: "spinning", False: "solid state", None: "virtual"}[self.drive.rotational]
        return f"{self.kind} on {self.drive.name} ({medium})"


def filesystem_of(path: Path, root: Path = Path("/")) -> Filesystem:
    """Find the mount that holds `path`, symbolic links resolved.

    Raises
    ------
    LookupError
        If no mount holds it, which only a broken /proc can cause.
    """
    target = path.resolve()
    found: tuple[Path, str, str, str] | None = None
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        # "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext4 /dev/root rw,errors=continue"
        fixed, _, rest = line.partition(" - ")
        device, _, mount = fixed.split()[2:5]
        kind, source = rest.split()[:2]
        point = Path(_unescape(mount))
        # The longest mount point wins, and of two at the same point the later, which hides the earlier.
        if target.is_relative_to(point) and (found is None or point.is_relative_to(found[0])):
            found = point, kind, _unescape(source), device
    if found is None:
        raise LookupError(f"no mount in /proc/self/mountinfo holds {target}")
    _, kind, source, device = found
    return Filesystem(kind, source, _drive(device, root))


def _drive(device: str, root: Path) -> Drive | None:
    """Follow ``major:minor`` to the drive; a partition has no queue of its own, its parent folder does."""
    link = root / "sys/dev/block" / device
    if not link.exists():
        return None
    folder = Path(os.path.realpath(link))
    for candidate in (folder, folder.parent):
        rotational = candidate / "queue/rotational"
        if rotational.exists():
            if candidate.name.startswith(_VIRTUAL):
                return Drive(candidate.name, None)
            return Drive(candidate.name, rotational.read_text().strip() == "1")
    return None


def _unescape(text: str) -> str:
    """Mountinfo writes blanks and backslashes as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
