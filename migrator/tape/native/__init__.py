"""The recorder of operators, built for the torch that is installed."""

from __future__ import annotations

import importlib.util
import sysconfig
from functools import cache
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor

from torch_tiers.allocator.extension import CannotBuild, Extension, compiler, obstacle_to

SOURCE = Path(__file__).with_name("tape.cpp")
HEADERS = tuple(
    SOURCE.with_name(name)
    for name in ("devices.h", "effects.h", "forms.h", "interceptor.h", "object.h", "record.h", "recorder.h")
)

Period: TypeAlias = Any  # a capsule
Use: TypeAlias = tuple[int, int, int]
"""A storage of a tape, the version that a tensor on it had (-1: it has none), and the state it was in."""


class Recorder(Protocol):
    """The module; `tape.cpp` says what each function does."""

    def install(self) -> None:  # noqa: D102
        ...

    def begin(self, with_states: bool, /) -> bool:  # noqa: D102
        ...

    def end(self) -> Period | None:  # noqa: D102
        ...

    def pause(self) -> bool:  # noqa: D102
        ...

    def resume(self, was: bool, /) -> None:  # noqa: D102
        ...

    def is_recording(self) -> bool:  # noqa: D102
        ...

    def enter(self, number: int, /) -> None:  # noqa: D102
        ...

    def position(self, number: int, /) -> None:  # noqa: D102
        ...

    def saved(self, tensor: Tensor, /) -> Use | None:  # noqa: D102
        ...

    def unseen(self, tensor: Tensor | None, /) -> None:  # noqa: D102
        ...

    def contents(self, period: Period, /) -> tuple[Any, ...]:  # noqa: D102
        ...

    def find(self, period: Period, tensor: Tensor, /) -> Use | None:  # noqa: D102
        ...

    def is_alive(self, period: Period, storage: int, /) -> bool:  # noqa: D102
        ...

    def sizes(self, period: Period, /) -> tuple[int, int, int, int]:  # noqa: D102
        ...

    def effects(self, name: str, overload: str, /) -> tuple[list[int], bool, bool, int]:  # noqa: D102
        ...


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
        name="tape",
        title="the recorder of operators",
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
def load(library: Path) -> Recorder:
    """The module in a library, in its place among PyTorch's operators.

    Raises
    ------
    CannotBuild
        If it does not load, or its place is taken.
    """
    # In full: under this name it comes to stand among all modules of the program.
    name = f"{__name__}.tape"
    loader = ExtensionFileLoader(name, str(library))
    spec = importlib.util.spec_from_file_location(name, library, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        text = f"the recorder of operators does not load: {error}; remove {library} to have it built again"
        raise CannotBuild(text) from error
    recorder = cast("Recorder", module)
    try:
        recorder.install()
    except RuntimeError as error:
        text = str(error).partition("\n")[0]
        raise CannotBuild(f"the recorder of operators cannot stand in PyTorch's dispatcher: {text}") from error
    return recorder
