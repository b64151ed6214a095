"""Reads the facts about machine and directory that decide how GPU memory can go to a drive.

All is read from /proc, /sys and the environment: without torch, without a CUDA context and without starting cuFile,
whose parameters must be set before it starts. Every reader takes the root of the file system, for tests to feed it one.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import re
import site
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from torch_tiers.allocator.nvme.mounts import Mount, block_device, mount_of

P2PDMA_VARIABLE = "CUFILE_USE_PCIP2PDMA"
_KVIKIO = ("kvikio-cu13", "kvikio-cu12", "kvikio")
_CUFILE = "libcufile.so.0"
_SYMBOL = b" p2pdma_pgmap_ops"
_BARS = 6  # of a PCI device; the lines of its file `resource` that come first


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU: its uuid, its name, and the bytes of memory that other devices can address (BAR1), if known."""

    uuid: str
    name: str
    bar1: int | None


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts that hold for every directory.

    Attributes
    ----------
    gpu
        That of the program; None if it uses none, or the driver does not list it.
    kernel
        Its release.
    driver
        The version of NVIDIA's kernel modules.
    open_modules
        Whether these are the open ones.
    static_bar1
        Whether the driver was told to map all of the GPU's memory for other devices; True where it need not be told.
    nvidia_fs
        Whether that kernel module is loaded.
    p2pdma
        Whether the kernel has PCI P2PDMA; None where /proc/kallsyms cannot be read.
    multipath
        Whether the kernel may put several paths under one NVMe drive.
    kvikio
        Its version, if it is installed.
    cufile
        Whether libcufile is found.
    udev
        Whether /run/udev can be read.
    wsl
        Whether this is Windows' subsystem for Linux.
    forced
        The variable by which the user has cuFile or kvikio use bounce buffers.
    p2pdma_off
        Whether the user has switched PCI P2PDMA off in cuFile.
    """

    gpu: Gpu | None
    kernel: str
    driver: str | None
    open_modules: bool
    static_bar1: bool
    nvidia_fs: bool
    p2pdma: bool | None
    multipath: bool
    kvikio: str | None
    cufile: bool
    udev: bool
    wsl: bool
    forced: str | None
    p2pdma_off: bool


@dataclass(frozen=True, slots=True)
class Place:
    """A directory: its file system, the drive below and md's level, if there is one, and whether O_DIRECT works."""

    path: Path
    kind: str
    device: str
    options: tuple[str, ...]
    drive: str | None
    raid: str | None
    direct: bool


def read_machine(
    gpu: str | None,
    *,
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
    kvikio: Callable[[], str | None] | None = None,
    cufile: Callable[[], bool] | None = None,
) -> Machine:
    """Read all that holds for every directory.

    Parameters
    ----------
    gpu
        The uuid of the GPU that the program uses, or None.
    kvikio, cufile
        What tells kvikio's version and whether libcufile is found.
    """
    modules = _text(root / "proc/driver/nvidia/version")
    driver = re.search(r"\b\d{3,}\.\d+(?:\.\d+)*\b", modules)
    kernel = _text(root / "proc/sys/kernel/osrelease").strip()
    installed = (kvikio or kvikio_version)()
    return Machine(
        gpu=_gpu(gpu, root),
        kernel=kernel,
        driver=driver[0] if driver else None,
        open_modules="Open Kernel Module" in modules,
        static_bar1=platform.machine() != "x86_64"
        or "RMForceStaticBar1=1" in _text(root / "proc/driver/nvidia/params").replace(" ", ""),
        nvidia_fs=nvidia_fs_loaded(root),
        # A file of many MB, which is of no interest to who has no kvikio.
        p2pdma=_has_symbol(root / "proc/kallsyms") if installed else False,
        multipath=_text(root / "sys/module/nvme_core/parameters/multipath").strip() == "Y",
        kvikio=installed,
        cufile=(cufile or _cufile_found)(),
        udev=os.access(root / "run/udev", os.R_OK | os.X_OK),
        wsl="microsoft" in _text(root / "proc/version").lower(),
        forced=_forced(environ),
        p2pdma_off=environ.get(P2PDMA_VARIABLE, "true").lower() in ("false", "0", "off", "no"),
    )


def read_place(path: Path, *, root: Path = Path("/")) -> Place:
    """Look at a directory; a file without a name is made in it for a moment."""
    try:
        mount = mount_of(path, root)
    except (OSError, LookupError):  # a sandbox without all of /proc
        mount = Mount("an unknown file system", "", "", ())
    drive = block_device(mount.device, root)
    level = _text(drive / "md/level").strip() if drive is not None else ""
    return Place(
        path=path,
        kind=mount.kind,
        device=mount.device,
        options=mount.options,
        drive=drive.name if drive is not None else None,
        raid=level or None,
        direct=_takes_direct(path),
    )


def kvikio_version() -> str | None:
    """The installed version of kvikio, whichever CUDA it is for; it is not imported."""
    for distribution in _KVIKIO:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def nvidia_fs_loaded(root: Path = Path("/")) -> bool:
    """Whether the kernel module nvidia-fs is loaded."""
    if (root / "proc/driver/nvidia-fs").is_dir():
        return True
    return any(line.startswith("nvidia_fs ") for line in _text(root / "proc/modules").splitlines())


def _gpu(uuid: str | None, root: Path) -> Gpu | None:
    if uuid is None:
        return None
    return next((gpu for gpu in _gpus(root) if gpu.uuid == uuid.removeprefix("GPU-")), None)


def _gpus(root: Path) -> list[Gpu]:
    found = []
    for file in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        lines = (line.partition(":") for line in _text(file).splitlines())
        fields = {key.strip(): value.strip() for key, _, value in lines}
        bar1 = _largest_bar(_text(root / "sys/bus/pci/devices" / file.parent.name / "resource"))
        found.append(Gpu(fields.get("GPU UUID", "").removeprefix("GPU-"), fields.get("Model", "a GPU"), bar1))
    return found


def _largest_bar(resource: str) -> int | None:
    """Which number BAR1 has differs between generations; it is always the largest."""
    sizes = []
    for line in resource.splitlines()[:_BARS]:
        start, end = (int(field, 16) for field in line.split()[:2])
        sizes.append(end - start + 1 if end else 0)
    return max(sizes, default=0) or None


def _has_symbol(kallsyms: Path) -> bool | None:
    try:
        with kallsyms.open("rb") as lines:
            return any(_SYMBOL in line for line in lines)
    except OSError:
        return None


def _cufile_found() -> bool:
    try:
        ctypes.CDLL(_CUFILE)  # torch has loaded it already where it was built for CUDA
    except OSError:
        packages = [*site.getsitepackages(), site.getusersitepackages()]
        return any(any(Path(folder).glob(f"nvidia/*/lib/{_CUFILE}")) for folder in packages)
    return True


def _forced(environ: Mapping[str, str]) -> str | None:
    for name in ("KVIKIO_COMPAT_MODE", "CUFILE_FORCE_COMPAT_MODE"):
        if environ.get(name, "").lower() in ("on", "true", "yes", "1"):
            return name
    return None


def _takes_direct(path: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True


def _text(file: Path) -> str:
    """What a file says; nothing where it is not there or cannot be read."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
