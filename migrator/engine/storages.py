"""Which bytes of which storages a period has saved so far: what has been saved before is not saved again.

A storage is known by the address of its C++ object for as long as a weak reference to it is held:
the reference keeps that address, not the memory, from being used again. (The address of the *data*
is no key: a freed storage's comes back within the same step.)

`native/storages.h` is the same in C++.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from torch_tiers.migrator.lanes import SLOT

if TYPE_CHECKING:
    from torch_tiers.migrator.engine.moved import Saved
    from torch_tiers.migrator.recompute.dropped import Recomputed


class Known:
    """The bytes ``[low, high)`` of a storage, as they were at one version of a version counter, or of several.

    Attributes
    ----------
    ident : int
        Number within the period.
    base : weak reference
        To the tensor whose version counter it is, that of which the saved one is a view; of several the first.
    cdata : int
        Identity of the storage, good for as long as this object lives: it is a weak reference to it.
    saved : Saved or None
        Where it moves, if it does.
    made : weak reference or None
        How it is recomputed, if it is dropped.
    before : Known or None
        The one of the same storage that was found before it.
    """

    __slots__ = ("__weakref__", "base", "before", "cdata", "high", "ident", "low", "made", "saved", "version")

    def __init__(
        self,
        ident: int,
        low: int,
        high: int,
        base: Tensor,
        version: int,
        storage: torch.UntypedStorage,
        before: Known | None,
    ) -> None:
        self.ident = ident
        self.low = low
        self.high = high
        self.base = weakref.ref(base)
        self.version = version
        _release()
        self.cdata: int = storage._weak_ref()  # type: ignore[assignment]
        ref = _Held(self, _gone.append)
        ref.cdata = self.cdata
        _held[id(ref)] = ref
        self.saved: Saved | None = None
        self.made: weakref.ref[Recomputed] | None = None
        self.before = before

    def freed(self) -> bool:
        """Whether the program's memory is gone."""
        return bool(torch.UntypedStorage._expired(self.cdata))


class _Held(weakref.ref[Known]):
    """A weak reference to a storage, for as long as a `Known` lives, and until the next one is made.

    That one releases nothing itself: what is called while a graph is freed may have to raise what a signal's handler
    does, Ctrl-C's for one, and Python drops that.
    """

    __slots__ = ("cdata",)
    cdata: int


_held: dict[int, _Held] = {}
_gone: deque[_Held] = deque()


def _release() -> None:
    """Release the storages of those that are gone."""
    while _gone:
        with suppress(IndexError):  # another thread was quicker
            ref = _gone.popleft()
            del _held[id(ref)]
            torch.UntypedStorage._free_weak_ref(ref.cdata)


def holders(known: Known) -> int:
    """How many tensors there are on a storage; 0 if it is freed."""
    # The object of Python's that stands for the storage counts as well. So it is made, if there is none.
    storage = torch.UntypedStorage._new_with_weak_ptr(known.cdata)
    return 0 if storage is None else _references(known.cdata) - 1


_references: Callable[[int], int] = torch._C._storage_Use_Count

SWEEP = 4096  # storages; a period without backward (evaluation that forgot no_grad) must not grow for ever
NEAR = 64  # entries of one storage that are looked at: of thousands of slices each would look at all before it


class Storages:
    """The storages that a period has saved so far."""

    def __init__(self) -> None:
        self._known: dict[int, Known] = {}  # by address, the last that was found there
        self._count = 0
        self._sweep_at = SWEEP

    def find(self, tensor: Tensor) -> Known:
        """What is known of the bytes that `tensor` needs; made on first sight."""
        if len(self._known) >= self._sweep_at:
            self._sweep()
        # Views share the counter of their base, and its version speaks for all the bytes of the base. A tensor
        # over the same memory that is no view (`unsafe_chunk`, `.data`) has a counter, and so a count, of its own;
        # but see `_is_beside`.
        base = tensor._base
        if base is None:
            base = tensor
        storage, version = tensor.untyped_storage(), tensor._version
        nbytes = storage.nbytes()
        low, high = (0, nbytes) if tensor.nbytes == nbytes else reach(tensor, nbytes)
        key = storage._cdata
        entry, near, beside = self._known.get(key), NEAR, None
        while entry is not None and near:
            # Another version is other content: a storage saved before and after an in-place operation
            # (ReLU(inplace=True) on a normalisation's output) is two.
            if entry.version == version and entry.low <= low and high <= entry.high:
                of = entry.base()
                if of is base:
                    return entry
                if beside is None and of is not None and _is_beside(entry, of, tensor):
                    beside = entry
            entry, near = entry.before, near - 1
        if beside is not None:
            return beside
        before = self._current(self._known.get(key), base, version)
        entry = self._known[key] = Known(self._count, low, high, base, version, storage, before)
        self._count += 1
        return entry

    def _current(self, entry: Known | None, base: Tensor, version: int) -> Known | None:
        """The chain from `entry` on without what cannot be found again.

        Which is an earlier version of `base`, or of a tensor that is gone. A buffer that is filled anew in each step of
        a loop without backward, as when somebody serves and forgot ``no_grad``, would have one entry a step.
        """
        first = last = None
        near = NEAR
        while entry is not None and near:
            then, of = entry.before, entry.base()
            if of is not None and (of is not base or entry.version == version):
                if last is None:
                    first = entry
                else:
                    last.before = entry
                last = entry
            entry, near = then, near - 1
        if last is None:
            return entry
        last.before = entry
        return first

    def _sweep(self) -> None:
        """Forget storages that are freed: nobody can save them again."""
        alive = {key: known for key, known in self._known.items() if not known.freed()}
        self._known = alive
        self._sweep_at = max(SWEEP, 2 * len(alive))


def _is_beside(entry: Known, of: Tensor, tensor: Tensor) -> bool:
    """Whether a tensor over the bytes of `entry`, found for `of`, may do with those, though both count for themselves.

    Inductor hands the parts of a fused projection out as tensors of their own, and each would move the whole. Neither
    has a graph, and there is no replay, which would make one of them as it was; and the bytes have not left. What will
    leave is what is there then, for whomever: who changes it by one counter is noticed there, and by `.data` plain
    PyTorch does not notice either. Whether the copy waits for the stream that wrote it is for the mover to see.
    """
    saved = entry.saved
    if tensor._base is not None or entry.made is not None or (saved is not None and saved.offset >= 0):
        return False
    return not of.requires_grad and not tensor.requires_grad


def reach(tensor: Tensor, nbytes: int) -> tuple[int, int]:
    """The bytes of a storage of `nbytes` to move for a part of it: its span, or all if that is half of them or more.

    Parts of one storage often interleave (those of a fused projection): all of it moves once, then. A part without
    gaps that is no view has a counter of its own, as its neighbours have: it moves alone.
    """
    size = tensor.itemsize
    elements = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    low = int(tensor.storage_offset()) * size
    high = low + elements * size
    if 2 * (high - low) >= nbytes and (tensor._is_view() or tensor.nbytes < high - low):
        return 0, nbytes
    return low - low % SLOT, high


def memory_of(tensor: Tensor, least: int) -> int:
    """The identity of the storage of a tensor that may move: one of at least so many bytes. 0 if it may not.

    It must be nothing but strided memory, and no view of a parameter.
    """
    if type(tensor) is not Tensor or not _is_plain(tensor) or not tensor.numel():
        return 0
    storage = tensor.untyped_storage()
    if storage.nbytes() < least:
        return 0
    base = tensor._base
    return 0 if base is not None and isinstance(base, nn.Parameter) else int(storage._cdata)


_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_keys = torch._C._dispatch_keys
_plain: set[int] = set()


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is nothing but strided memory. All of it shows in the dispatch keys, so one look is enough."""
    keys = _keys(tensor).raw_repr()
    if keys in _plain:
        return True
    if tensor.layout is not torch.strided or _is_wrapped(tensor) or tensor.is_nested or tensor.is_quantized:
        return False
    if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
        return False
    _plain.add(keys)
    return True
