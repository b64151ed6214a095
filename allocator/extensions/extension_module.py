"""Python modules in C++ against PyTorch's headers: built at their first use, and loaded under their full name."""

from __future__ import annotations

import importlib.util
import sysconfig
from dataclasses import dataclass
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType

import torch

from torch_tiers.allocator.extensions.extension import CannotBuild, Extension

_LIBRARIES = ("libtorch_python.so", "libtorch_cpu.so", "libc10.so")


@dataclass(frozen=True)
class ExtensionModule:
    """One Python module in C++.

    Attributes
    ----------
    name : str
        Its full name, under which it is imported; the last part names the file.
    title : str
        What messages call it.
    source : Path
        The file that is compiled.
    headers : tuple of Path
        Our own headers that it includes.
    """

    name: str
    title: str
    source: Path
    headers: tuple[Path, ...]

    def obstacle(self, cache_dir: Path) -> str | None:
        """Why it cannot be built in `cache_dir`, found out without building it; None if no reason is known."""
        return self._extension().obstacle(cache_dir)

    def build(self, cache_dir: Path) -> Path:
        """The library, from `cache_dir` if it has been built before.

        Raises
        ------
        CannotBuild
            If it is not there, and there is no compiler or no header of Python's, or it does not compile.
        """
        return self._extension().build(cache_dir)

    def _extension(self) -> Extension:
        root = Path(torch.__file__).parent
        return Extension(
            name=self.name.rpartition(".")[2],
            title=self.title,
            sources=(self.source,),
            headers=self.headers,
            includes=(root / "include" / "torch" / "csrc" / "api" / "include", _headers()),
            libraries=tuple(root / "lib" / name for name in _LIBRARIES),
            needs=_headers_of_python,
        )

    def load(self, library: Path) -> ModuleType:
        """The module in a library.

        Raises
        ------
        CannotBuild
            If it does not load.
        """
        loader = ExtensionFileLoader(self.name, str(library))
        spec = importlib.util.spec_from_file_location(self.name, library, loader=loader)
        assert spec is not None
        try:
            module = importlib.util.module_from_spec(spec)
            loader.exec_module(module)
        except ImportError as error:
            text = f"{self.title} does not load: {error}; remove {library} to have it built again"
            raise CannotBuild(text) from error
        return module


def _headers() -> Path:
    return Path(sysconfig.get_paths()["include"])


def _headers_of_python() -> None:
    headers = _headers()
    if not (headers / "Python.h").exists():
        raise CannotBuild(f"no headers of Python's found in {headers}: install those of this version (python3-dev)")
