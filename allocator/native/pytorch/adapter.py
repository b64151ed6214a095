"""Makes the native core PyTorch's allocator: builds the adapter once for the installed torch, and installs it.

The adapter (the C++ beside this file) is compiled against PyTorch's own headers; see `allocator.extensions`.
"""

from __future__ import annotations

import ctypes
import os
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from torch_tiers.allocator import native
from torch_tiers.allocator.extensions.extension import CannotBuild, Extension, compiler, obstacle_to

_More = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_int, ctypes.c_uint64)
_called_for_good: list[object] = []

_HERE = Path(__file__).parent
SOURCES = tuple(_HERE / name for name in ("adapter.cpp", "pools.cpp", "statistics.cpp"))
HEADERS = (_HERE / "adapter.h", _HERE.parent / "core.h")


class NoAdapter(CannotBuild):
    """The adapter cannot be installed here; the text says what is missing."""


def obstacle() -> str | None:
    """Why the adapter cannot be built here, found out without building it; None if no reason is known."""
    return obstacle_to(native.library, compiler, _cuda_runtime, _cuda_headers)


def build(cache_dir: Path) -> Path:
    """The adapter's library for this torch, from `cache_dir` if it has been built before.

    Raises
    ------
    CannotBuild
        If there is no compiler, no CUDA headers, or it does not compile.
    """
    compiler()  # to say so first: it is what most machines lack
    runtime, lib = _cuda_runtime(), Path(torch.__file__).with_name("lib")
    torch_libraries = ("libtorch_cuda.so", "libc10_cuda.so", "libc10.so", "libtorch_cpu.so")
    adapter = Extension(
        name="adapter",
        title="the allocator's adapter",
        sources=SOURCES,
        headers=HEADERS,
        includes=tuple(_cuda_headers()),
        libraries=(*(lib / name for name in torch_libraries), runtime, native.LIBRARY),
    )
    return adapter.build(cache_dir)


def install(library: Path, hbm: int, more: Callable[[int, int], bool]) -> None:
    """Make the core PyTorch's allocator for CUDA memory. Before CUDA is initialised; for good.

    Parameters
    ----------
    library : Path
        What `build` returned.
    hbm : int
        Limit per GPU, in bytes; 0 means all that is free at the first request.
    more : callable
        Called with a device and a size when every tier is full. It may raise a limit, and returns whether to try again.
        The limit of DRAM is 0 until it raises it.

    Raises
    ------
    NoAdapter
        If CUDA is initialised already, or the library does not load.
    """
    native.library()  # the adapter's symbols come from there
    adapter = _load(library)
    text = ctypes.create_string_buffer(1024)
    called = _More(more)
    _called_for_good.append(called)  # the adapter lasts as long as the process
    if adapter.tiers_install(hbm, called, text, len(text)):
        raise NoAdapter(f"PyTorch does not take the allocator: {text.value.decode().splitlines()[0]}")


def core_of(library: Path, device: int) -> native.Core | None:
    """The core that serves a GPU; None before its first allocation."""
    address = _load(library).tiers_core_of(device)
    return native.Core.at(address) if address else None


@cache
def _load(library: Path) -> ctypes.CDLL:
    try:
        adapter = ctypes.CDLL(str(library))
    except OSError as error:
        raise NoAdapter(f"the adapter does not load: {error}; remove {library} to have it built again") from error
    adapter.tiers_install.argtypes = [ctypes.c_uint64, _More, ctypes.c_char_p, ctypes.c_uint64]
    adapter.tiers_core_of.restype = ctypes.c_void_p
    return adapter


def _cuda_headers() -> list[Path]:
    """Where cuda_runtime_api.h lies: in PyTorch's own wheels, or a toolkit's folder."""
    site = Path(sysconfig.get_paths()["purelib"])
    toolkit = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    found = [
        path
        for path in (
            Path(toolkit) / "include",
            *sorted(site.glob("nvidia/cu*/include")),
            *sorted(site.glob("nvidia/cuda_runtime/include")),
        )
        if (path / "cuda_runtime_api.h").exists()
    ]
    if not found:
        raise NoAdapter("no CUDA headers found (cuda_runtime_api.h): install nvidia-cuda-runtime, or set CUDA_HOME")
    return found


def _cuda_runtime() -> Path:
    """The CUDA runtime library that this process's torch uses."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        name = line.split(maxsplit=5)[-1]
        if "/libcudart.so" in name:
            return Path(name)
    raise NoAdapter("this torch brings no CUDA runtime library: it was built without CUDA")
