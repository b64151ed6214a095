"""The native twin of `migrator.engine.tensors`, built for the torch that is installed."""

from __future__ import annotations

import importlib.util
import logging
import sysconfig
from functools import cache
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import cast

import torch

from torch_tiers.allocator.extension import CannotBuild, Extension, compiler, obstacle_to
from torch_tiers.migrator.engine import tensors as in_python
from torch_tiers.migrator.engine.tensors import Tensors

log = logging.getLogger("tiers")

SOURCE = Path(__file__).with_name("tensors.cpp")
HEADERS = tuple(SOURCE.with_name(name) for name in ("hooks.h", "moved.h", "object.h", "storages.h", "ways.h"))


def obstacle() -> str | None:
    """What keeps it from being built here, without building it; None if nothing is known to."""
    return obstacle_to(compiler, _headers)


def build(cache_dir: Path) -> Path:
    """The library, from `cache_dir` if it has been built before.

    Raises
    ------
    CannotBuild
        If there is no compiler, no header of Python's, or it does not compile.
    """
    root = Path(torch.__file__).parent
    libraries = ("libtorch_python.so", "libtorch_cpu.so", "libc10.so")
    extension = Extension(
        name="tensors",
        title="the native part of the hooks",
        sources=(SOURCE,),
        headers=HEADERS,
        includes=(root / "include" / "torch" / "csrc" / "api" / "include", _headers()),
        libraries=tuple(root / "lib" / name for name in libraries),
    )
    return extension.build(cache_dir)


def _headers() -> Path:
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").exists():
        raise CannotBuild(f"no headers of Python's found in {headers}: install those of this version (python3-dev)")
    return headers


@cache
def load(library: Path) -> Tensors:
    """The module in a library.

    Raises
    ------
    CannotBuild
        If it does not load.
    """
    # In full: under this name it comes to stand among all modules of the program.
    name = f"{__name__}.tensors"
    loader = ExtensionFileLoader(name, str(library))
    spec = importlib.util.spec_from_file_location(name, library, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        text = f"the native part of the hooks does not load: {error}; remove {library} to have it built again"
        raise CannotBuild(text) from error
    return cast("Tensors", module)


def best(cache_dir: Path) -> Tensors:
    """The native twin, or where it cannot be had the module in Python, which is said."""
    try:
        return load(build(cache_dir))
    except CannotBuild as missing:
        log.info("%s; the hooks take more of the host's time", missing)
        return in_python
