"""Has operators read copies of storages in place of the storages; see `native/substitutes.h`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from torch_tiers.allocator.extensions.extension import CannotBuild
from torch_tiers.migrator.tape import native


class Substitutes:
    """Substitutes for some storages.

    A product of matrices, a convolution or a cast that reads one gets it from a copy. All other operators get the
    storage itself, and so do kernels that no operator launches.

    Parameters
    ----------
    library : native.Recorder
        The module.
    ask : callable
        Called before each operator that reads one, in its thread, with the number of the storage, and whether that was
        written by an operator since `renew` was called for it. Returns the byte of `buffer` at which the copy begins,
        which the current stream may read; or -1: the operator reads the storage itself. What it raises in the main
        thread comes once the operator has read the storage; in others the operator raises a RuntimeError.
    buffer : Tensor
        The memory that copies lie in: all of a storage, of uint8.

    Attributes
    ----------
    include_thread : callable
        Has operators of this thread read substitutes from now on; a backward's threads follow the one that runs it.
    """

    def __init__(self, library: native.Recorder, ask: Callable[[int, bool], int], buffer: Tensor) -> None:
        self._native = library
        self._ask = ask
        self._buffer = buffer
        self._handle: native.Handle = library.substitute((), ask, buffer)
        self.include_thread: Callable[[], None] = library.include_thread

    def set(self, tensors: Sequence[Tensor]) -> None:
        """Substitute the storages of these tensors: one for each, and its place is its number. To be called once."""
        self._handle = self._native.substitute(tensors, self._ask, self._buffer)

    def close(self) -> None:
        """Substitute nothing any more. Operators that have looked a substitute up ask once more."""
        self._native.keep(self._handle)

    def renew(self, number: int) -> list[tuple[int, int, int]]:
        """A copy begins; return the streams on which operators have written the storage since the last one did.

        They are as `torch.cuda.Stream` has them: id, index and type of the device. The copy must wait for what they
        have been given so far.
        """
        return self._native.renew(self._handle, number)

    def readers(self, number: int) -> int:
        """How many operators use a copy now. It must stay where it is until there are none."""
        return self._native.readers(self._handle, number)


def load(cache_dir: Path) -> Callable[[Callable[[int, bool], int], Tensor], Substitutes] | str:
    """What makes substitutes, built if it has not been; or what keeps it from being so."""
    try:
        return partial(Substitutes, native.load(native.MODULE.build(cache_dir)))
    except CannotBuild as reason:
        return str(reason)
