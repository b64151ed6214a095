"""The recorder of operators, built for the torch that is installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast

from torch import Tensor

from torch_tiers.allocator.extensions.extension import CannotBuild
from torch_tiers.allocator.extensions.extension_module import ExtensionModule

_HERE = Path(__file__).parent
MODULE = ExtensionModule(
    name=f"{__name__}.tape",
    title="the recorder of operators",
    source=_HERE / "tape.cpp",
    headers=tuple(sorted(_HERE.glob("*.h"))),
)

Handle: TypeAlias = Any  # a capsule


class Recorder(Protocol):
    """The module; `tape.cpp` says what each function does."""

    def install(self) -> None:  # noqa: D102
        ...

    def show_views(self, on: bool, /) -> None:  # noqa: D102
        ...

    def begin(self) -> bool:  # noqa: D102
        ...

    def end(self) -> None:  # noqa: D102
        ...

    def pause(self) -> bool:  # noqa: D102
        ...

    def resume(self, was: bool, /) -> None:  # noqa: D102
        ...

    def is_recording(self) -> bool:  # noqa: D102
        ...

    def listed(self) -> list[tuple[str, list[tuple[int, ...]]]] | None:  # noqa: D102
        ...

    def clock_begin(self, device: int, stream: int, /) -> int:  # noqa: D102
        ...

    def clock_tick(self, stream: int, /) -> None:  # noqa: D102
        ...

    def clock_end(self, number: int, is_wanted: bool, /) -> list[float]:  # noqa: D102
        ...

    def clock_enter(self) -> int:  # noqa: D102
        ...

    def clock_leave(self, span: int, /) -> None:  # noqa: D102
        ...

    def substitute(  # noqa: D102
        self, tensors: Sequence[Tensor], ask: Callable[[int, bool], int], buffer: Tensor, /
    ) -> Handle: ...

    def keep(self, substitutes: Handle, /) -> None:  # noqa: D102
        ...

    def include_thread(self) -> None:  # noqa: D102
        ...

    def renew(self, substitutes: Handle, number: int, /) -> list[tuple[int, int, int]]:  # noqa: D102
        ...

    def readers(self, substitutes: Handle, number: int, /) -> int:  # noqa: D102
        ...

    def settings(self) -> int:  # noqa: D102
        ...

    def names(self, closure: Handle, /) -> list[str]:  # noqa: D102
        ...

    def is_stale(self, closure: Handle, /) -> bool:  # noqa: D102
        ...

    def forget(self, packs: Handle, /) -> None:  # noqa: D102
        ...

    def packs(self) -> Handle:  # noqa: D102
        ...

    def refilled(self, packs: Handle, storages: Sequence[int], /) -> None:  # noqa: D102
        ...

    def note(self, packs: Handle, tensor: Tensor, packed: Any, key: str, /) -> None:  # noqa: D102
        ...

    def find_packed(  # noqa: D102
        self, packs: Handle, tensor: Tensor, settings: int, is_fixed: Callable[[int], bool], /
    ) -> tuple[int, tuple[Any, ...], tuple[str, ...], int, bool, Handle] | None: ...

    def also(self, closure: Handle, before: Handle, /) -> bool:  # noqa: D102
        ...

    def make(self, closure: Handle, values: Sequence[Tensor], /) -> list[Tensor] | str:  # noqa: D102
        ...


@cache
def load(library: Path) -> Recorder:
    """The module in a library, in its place among PyTorch's operators.

    Raises
    ------
    CannotBuild
        If it does not load, or its place is taken.
    """
    recorder = cast("Recorder", MODULE.load(library))
    try:
        recorder.install()
    except RuntimeError as error:
        text = str(error).partition("\n")[0]
        raise CannotBuild(f"{MODULE.title} cannot stand in PyTorch's dispatcher: {text}") from error
    return recorder
