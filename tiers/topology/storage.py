"""What lies under a path: file system, device, kind of drive."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch_tiers.allocator.nvme.mounts import block_device, mount_of

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
    """Find the file system that holds `path`, symbolic links resolved.

    Raises
    ------
    LookupError
        If no mount holds it, which only a broken /proc can cause.
    """
    mount = mount_of(path, root)
    return Filesystem(mount.kind, mount.source, _drive(mount.device, root))


def _drive(device: str, root: Path) -> Drive | None:
    folder = block_device(device, root)
    if folder is None:
        return None
    if folder.name.startswith(_VIRTUAL):
        return Drive(folder.name, None)
    return Drive(folder.name, (folder / "queue/rotational").read_text().strip() == "1")
