"""Which storage a tensor lies on, told apart from others that come and go at the same address.

A storage is known by the address of its C++ object for as long as a weak reference to it is held:
the reference keeps that address, not the memory, from being used again. (The address of the *data*
is no key: a freed storage's comes back within the same step.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from migrator.lanes import SLOT

if TYPE_CHECKING:
    from migrator.engine import Saved
    from migrator.remake import Made


class Known:
    """The bytes ``[low, high)`` of a storage, as they were at one version of one version counter.

    Attributes
    ----------
    ident : int
        Number within the period.
    base : weak reference
        To the tensor whose version counter it is, that of which the saved one is a view.
    cdata : int
        Identity of the storage, good for as long as this object lives: it is a weak reference to it.
    saved : Saved or None
        Where it moves, if it does.
    made : weak reference or None
        How it is made again, if it is dropped.
    before : Known or None
        The one of the same storage that was found before it.
    """

    __slots__ = ("base", "before", "cdata", "high", "ident", "low", "made", "saved", "version")

    def __init__(
        self,
        ident: int,
        low: int,
        high: int,
        base: torch.Tensor,
        version: int,
        storage: torch.UntypedStorage,
        before: Known | None,
    ) -> None:
        self.ident = ident
        self.low = low
        self.high = high
        self.base = weakref.ref(base)
        self.version = version
        self.cdata: int = storage._weak_ref()  # type: ignore[assignment]
        self.saved: Saved | None = None
        self.made: weakref.ref[Made] | None = None
        self.before = before

    def __del__(self, free: Callable[[int], None] = torch.UntypedStorage._free_weak_ref) -> None:
        free(self.cdata)

    def freed(self) -> bool:
        """Whether the program's memory is gone."""
        return bool(torch.UntypedStorage._expired(self.cdata))


SWEEP = 4096  # storages; a period without backward (evaluation that forgot no_grad) must not grow for ever


class Storages:
    """The storages that a period has saved so far."""

    def __init__(self) -> None:
        self._known: dict[int, Known] = {}  # by address, the last that was found there
        self._count = 0
        self._sweep_at = SWEEP

    def find(self, tensor: torch.Tensor, storage: torch.UntypedStorage, version: int) -> Known:
        """What is known of the bytes that `tensor` needs; made on first sight."""
        if len(self._known) >= self._sweep_at:
            self._sweep()
        # Views share the counter of their base, and its version speaks for all the bytes of the base. A tensor
        # over the same memory that is no view (`unsafe_chunk`, `.data`) has a counter, and so a count, of its own.
        base = tensor._base
        if base is None:
            base = tensor
        nbytes = storage.nbytes()
        low, high = (0, nbytes) if tensor.nbytes == nbytes else _reach(tensor, nbytes)
        key = storage._cdata
        entry = last = self._known.get(key)
        while entry is not None:
            # Another version is other content: a storage saved before and after an in-place operation
            # (ReLU(inplace=True) on a normalisation's output) is two.
            if entry.version == version and entry.low <= low and high <= entry.high and entry.base() is base:
                return entry
            entry = entry.before
        entry = self._known[key] = Known(self._count, low, high, base, version, storage, last)
        self._count += 1
        return entry

    def _sweep(self) -> None:
        """Forget storages that are freed: nobody can save them again."""
        alive = {key: known for key, known in self._known.items() if not known.freed()}
        self._known = alive
        self._sweep_at = max(SWEEP, 2 * len(alive))


def _reach(tensor: torch.Tensor, nbytes: int) -> tuple[int, int]:
    """The bytes of a storage of `nbytes` to move for a part of it: its span, or all if that is half of them or more.

    Views of one storage often interleave (the parts of a fused projection): all of it moves once, then.
    """
    size = tensor.itemsize
    elements = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    low = int(tensor.storage_offset()) * size
    high = low + elements * size
    if tensor._is_view() and 2 * (high - low) >= nbytes:
        return 0, nbytes
    return low - low % SLOT, high


_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_keys = torch._C._dispatch_keys
_plain: set[int] = set()


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but strided memory. All of it shows in the dispatch keys, so one look is enough."""
    keys = _keys(tensor).raw_repr()
    if keys in _plain:
        return True
    if tensor.layout is not torch.strided or _is_wrapped(tensor) or tensor.is_nested:
        return False
    if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
        return False
    _plain.add(keys)
    return True
