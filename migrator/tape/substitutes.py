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

    An operator of PyTorch's own that only reads a tensor gets one on a copy instead. Operators that take views, write,
    look at a few rows, or take lists of tensors get the tensor itself, and so do kernels that no operator launches.

    Parameters
    ----------
    library : native.Recorder
        The module.
    ask : callable
        Called before each operator that reads one, in its thread, with the number of the storage, and whether that was
        written by an operator since `renew` was called for it. Returns the byte of `buffer` at which the copy begins,
        which the current stream may read; or -1: the operator reads the storage itself. What it raises, the operator
        does, as a RuntimeError.
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
        self.include_thread: Callable[[], None] = library.come_by

    def set(self, tensors: Sequence[Tensor]) -> None:
        """Substitute the storages of these tensors, and no others: one for each, and its place is its number."""
        self._handle = None  # first: a storage has one substitute
        self._handle = self._native.substitute(tensors, self._ask, self._buffer)

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
