"""What the hooks do with every tensor that is saved, and with what is packed in its place.

All that happens once a tensor stands here, apart from what happens once a group, so that it can be done twice: in
Python, and again in C++ (`native/`) at a fraction of the host's time, where that can be built. `Tensors`
is what the two have in common; the tests of this module hold both to it.

A storage is known by the address of its C++ object for as long as a weak reference to it is held:
the reference keeps that address, not the memory, from being used again. (The address of the *data*
is no key: a freed storage's comes back within the same step.)
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from migrator.lanes import FULL_SPEED, SLOT
from migrator.recompute import ways

if TYPE_CHECKING:
    from migrator.engine.group import Claim, Group
    from migrator.engine.mover import Mover
    from migrator.hooks.actions import Action, Go
    from migrator.hooks.saver import Saver
    from migrator.hooks.sites import Place
    from migrator.hooks.stack import Hooks
    from migrator.recompute.dropped import Recomputed
    from migrator.recompute.origins import Origins
    from migrator.recompute.ways import Way
    from migrator.recording.recorder import Record


class Saved:
    """A storage, or the part of one, that moves: where it lies within its group.

    Attributes
    ----------
    alias : Tensor
        Holds the program's memory until that is let go.
    low, nbytes : int
        Which bytes of the storage.
    offset : int
        In the group; set when the group leaves.
    """

    __slots__ = ("alias", "group", "low", "nbytes", "offset")

    def __init__(self, group: Group, tensor: Tensor, low: int, nbytes: int) -> None:
        self.group = group
        self.alias = tensor.detach()
        self.low = low
        self.nbytes = nbytes
        self.offset = -1


class Moved:
    """What the graph holds in place of a saved tensor that moves.

    Attributes
    ----------
    claim : object
        What keeps the group from being forgotten; held, and never looked at.
    go : Go or None
        What the plan says of the site.
    record : Record or None
        If the period is recorded.
    was_used : bool
        Whether backward has asked for it.
    counter : Tensor
        Without memory. It shares the saved tensor's version counter: tensors that `saved` stands for may have several.
    version : int
        What the counter said.
    """

    __slots__ = (
        "__weakref__",
        "_claim",
        "_first",
        "_stride",
        "counter",
        "dtype",
        "go",
        "mover",
        "record",
        "saved",
        "size",
        "version",
        "was_used",
    )

    def __init__(
        self, tensor: Tensor, mover: Mover, saved: Saved, claim: Claim, go: Go | None, record: Record | None
    ) -> None:
        self._claim = claim
        self.mover = mover
        self.go = go
        self.saved = saved
        self.record = record
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self._stride = tensor.stride()
        self._first = int(tensor.storage_offset())  # in elements
        self.was_used = False
        self.counter = tensor.detach()
        self.version = self.counter._version
        self.counter.data = _nothing(tensor)

    def changed(self) -> bool:
        """Whether what was saved has been changed in place since."""
        return self.counter._version != self.version

    def view(self, buffer: Tensor | None) -> Tensor:
        """The tensor, on the buffer of its group or, without one, on the program's own memory."""
        saved = self.saved
        if buffer is None:
            return view(self.counter, saved.alias.untyped_storage(), self.dtype, self._first, self.size, self._stride)
        first = self._first + (saved.offset - saved.low) // self.dtype.itemsize
        return view(self.counter, buffer.untyped_storage(), self.dtype, first, self.size, self._stride)


def _nothing(tensor: Tensor) -> Tensor:
    """A tensor without memory, otherwise of the same kind."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device)


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
        How it is recomputed, if it is dropped.
    before : Known or None
        The one of the same storage that was found before it.
    """

    __slots__ = ("base", "before", "cdata", "high", "ident", "low", "made", "saved", "version")

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
        self.cdata: int = storage._weak_ref()  # type: ignore[assignment]
        self.saved: Saved | None = None
        self.made: weakref.ref[Recomputed] | None = None
        self.before = before

    def __del__(self, free: Callable[[int], None] = torch.UntypedStorage._free_weak_ref) -> None:
        free(self.cdata)

    def freed(self) -> bool:
        """Whether the program's memory is gone."""
        return bool(torch.UntypedStorage._expired(self.cdata))


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
        low, high = (0, nbytes) if tensor.nbytes == nbytes else _reach(tensor, nbytes)
        key = storage._cdata
        entry, near = self._known.get(key), NEAR
        while entry is not None and near:
            # Another version is other content: a storage saved before and after an in-place operation
            # (ReLU(inplace=True) on a normalisation's output) is two.
            of = entry.base()
            same = entry.version == version and (of is base or (of is not None and _is_beside(entry, of, tensor)))
            if same and entry.low <= low and high <= entry.high:
                return entry
            entry, near = entry.before, near - 1
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
    has a graph, so nobody recomputes one of them; and the bytes have not left. What will leave is what is there then,
    for whomever: who changes it by one counter is noticed there, and by `.data` plain PyTorch does not notice either.
    """
    saved = entry.saved
    if tensor._base is not None or (saved is not None and saved.offset >= 0):
        return False
    return not of.requires_grad and not tensor.requires_grad


def _reach(tensor: Tensor, nbytes: int) -> tuple[int, int]:
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
    if tensor.layout is not torch.strided or _is_wrapped(tensor) or tensor.is_nested:
        return False
    if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
        return False
    _plain.add(keys)
    return True


def arrange(members: list[Saved]) -> int:
    """Give each member its place in the group; the bytes of all."""
    # Large members first, then the small ones side by side: a lane that cannot ask for all at once gathers those.
    members.sort(key=lambda saved: saved.nbytes < FULL_SPEED)
    offset = 0
    for saved in members:
        saved.offset = offset
        offset = -(-(offset + saved.nbytes) // SLOT) * SLOT  # `round_up`, and a third of its time
    return offset


def spans(members: list[Saved], address: int) -> bytes:
    """Where each member goes, in a block at `address`, where from, and its bytes: three numbers of 64 bits."""
    numbers: list[int] = []  # not yet an array, which takes six times as long to grow
    for saved in members:
        first = saved.alias.untyped_storage().data_ptr() + saved.low
        numbers += (address + saved.offset, first, saved.nbytes)
    return array("Q", numbers).tobytes()


def let_go(members: list[Saved], empty: Callable[[torch.dtype], Tensor]) -> None:
    """Let go of the memory of what is saved. `empty` makes tensors without memory."""
    for saved in members:
        alias = saved.alias
        alias.data = empty(alias.dtype)


_below_autograd = torch._C._AutoDispatchBelowADInplaceOrView


def view(
    alias: Tensor,
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    first: int,
    size: torch.Size,
    stride: tuple[int, ...],
) -> Tensor:
    """A tensor on `storage` that shares the version counter of `alias`: changes in place are noticed there."""
    tensor = alias.detach()
    if tensor.dtype is dtype:
        with _below_autograd():  # where nothing counts as a change in place
            tensor.set_(storage, first, size, stride)
    else:
        tensor.data = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, first, size, stride)
    return tensor


def hooks(saver: Saver, place: Place[Action], least: int) -> Hooks:
    """What PyTorch is to call for `saver`: its own methods. The twin's go before them.

    Those have to know where the thread is, and that storages of fewer than `least` bytes stay.
    """
    return saver.pack, saver.unpack


def follow(way: Way, node: Any, source: Origins) -> list[Any] | None:
    """See `migrator.recompute.ways.follow`."""
    return ways.follow(way, node, source)


_SavedType: TypeAlias = Saved
_MovedType: TypeAlias = Moved
_StoragesType: TypeAlias = Storages


class Tensors(Protocol):
    """This module, or its native twin: each name means what it means here."""

    def Saved(self, group: Group, tensor: Tensor, low: int, nbytes: int) -> _SavedType:  # noqa: D102
        ...

    def Moved(  # noqa: D102
        self, tensor: Tensor, mover: Mover, saved: _SavedType, claim: Claim, go: Go | None, record: Record | None
    ) -> _MovedType: ...

    def Storages(self) -> _StoragesType:  # noqa: D102
        ...

    def memory_of(self, tensor: Tensor, least: int) -> int:  # noqa: D102
        ...

    def arrange(self, members: list[_SavedType]) -> int:  # noqa: D102
        ...

    def spans(self, members: list[_SavedType], address: int) -> bytes:  # noqa: D102
        ...

    def let_go(self, members: list[_SavedType], empty: Callable[[torch.dtype], Tensor]) -> None:  # noqa: D102
        ...

    def hooks(self, saver: Saver, place: Place[Action], least: int) -> Hooks:  # noqa: D102
        ...

    def follow(self, way: Way, node: Any, source: Origins) -> list[Any] | None:  # noqa: D102
        ...
