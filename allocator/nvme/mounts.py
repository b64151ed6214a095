"""Which mount holds a path."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo.

    Attributes
    ----------
    kind, source
        As mounted: ``ext4``, ``/dev/nvme0n1p1``.
    device
        ``major:minor``.
    options
        Those of the mount and of the file system, in order of their names.
    """

    kind: str
    source: str
    device: str
    options: tuple[str, ...]


def mount_of(path: Path, root: Path = Path("/")) -> Mount:
    """Find the mount that holds `path`, symbolic links resolved.

    Raises
    ------
    LookupError
        If no mount holds it, which only a broken /proc can cause.
    """
    target = path.resolve()
    found: tuple[Path, Mount] | None = None
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        # "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext4 /dev/root rw,errors=continue"
        fixed, _, rest = line.partition(" - ")
        device, _, at, options = fixed.split()[2:6]
        kind, source, *more = rest.split()
        point = Path(_unescape(at))
        # The longest mount point wins, and of two at the same point the later, which hides the earlier.
        if target.is_relative_to(point) and (found is None or point.is_relative_to(found[0])):
            every = {*options.split(","), *(option for part in more for option in part.split(","))}
            found = point, Mount(kind, _unescape(source), device, tuple(sorted(every)))
    if found is None:
        raise LookupError(f"no mount in /proc/self/mountinfo holds {target}")
    return found[1]


def block_device(device: str, root: Path = Path("/")) -> Path | None:
    """Follow ``major:minor`` to the folder of the whole drive; None where no block device has that number."""
    link = root / "sys/dev/block" / device
    if not device or not link.exists():
        return None
    folder = link.resolve()
    for candidate in (folder, folder.parent):  # a partition has no queue of its own, its parent folder does
        if (candidate / "queue/rotational").exists():
            return candidate
    return None


def _unescape(text: str) -> str:
    """Mountinfo writes blanks and backslashes as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
