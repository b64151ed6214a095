"""Saved tensors that are dropped in forward, and recomputed when backward asks for them.

The graph holds a `Dropped` in place of such a tensor. A `Dropped` refers to a `Recomputed`, which the tensors on one
storage share, and that to the packed inputs of a replay. Inputs that moved are fetched first, inputs that were dropped
are recomputed first. So the inputs of a recomputation live as long as the tensor is part of the graph, whatever
backward has released meanwhile.
"""

from __future__ import annotations

import weakref
from typing import Protocol

from torch import Tensor

from torch_tiers.migrator.offload.engine import Engine
from torch_tiers.migrator.planner.paces import Pace
from torch_tiers.migrator.recompute.replays import MODIFIED, Peek, Replay, run
from torch_tiers.migrator.recording.record import Record

FOR_RECOMPUTING = (
    "A tensor that tiers dropped to save memory is recomputed from it. If the program is to change it between "
    "forward and backward, choose a policy that recomputes nothing, such as TIERS_POLICY=flashneuron."
)


class _Owner(Protocol):
    engine: Engine


class Planned(Protocol):
    """The plan's action at the site of a dropped tensor."""

    @property
    def mover(self) -> _Owner: ...  # noqa: D102
    @property
    def pace(self) -> Pace | None: ...  # noqa: D102


class Recomputed:
    """The storage of dropped tensors, which it holds from the recomputation until their last use."""

    __slots__ = (
        *("__weakref__", "base", "counter", "engine", "index", "nbytes", "replay", "tensor", "unused", "version"),
    )

    def __init__(self, base: Tensor, replay: Replay, index: int, engine: Engine) -> None:
        self.base = weakref.ref(base)
        self.counter = engine.tensors.counter(base)
        self.version = self.counter._version
        self.nbytes = base.nbytes  # all of its storage
        self.replay = replay
        self.index = index  # in what that makes
        replay.makes[index] = weakref.ref(self)
        self.engine = engine
        self.unused = 0  # dropped tensors on it that backward has not asked for yet
        self.tensor: Tensor | None = None

    def is_of(self, base: Tensor) -> bool:
        """Return whether it recomputes the storage of this tensor, as it is now."""
        return self.base() is base and self.version == base._version

    @property
    def over(self) -> bool:
        """Return whether all tensors on it were used.

        If one is asked for again (retain_graph), it is recomputed and not kept.
        """
        return self.tensor is None and not self.unused

    def obtain(self, peek: Peek) -> Tensor:
        """Return all of the storage as one tensor; recompute it if need be, and keep it until its last use."""
        if self.tensor is None and any(type(packed) is Dropped for packed in self.replay.inputs):
            for made in reversed(self.sources() or ()):
                made._obtain(peek)
        return self._obtain(peek)

    def sources(self, most: int | None = None) -> list[Recomputed] | None:
        """Return the dropped storages that this one is recomputed from, directly or not, and that are to be kept.

        Returns None if there are more than `most`. The search is a loop: a chain of hundreds, as of a recurrent
        network, exceeds Python's recursion limit.
        """
        found = {self: None}
        for made in (order := [self]):
            for packed in made.replay.inputs:
                source = packed.made if isinstance(packed, Dropped) else None
                if source is not None and source.tensor is None and not source.over and source not in found:
                    found[source] = None
                    order.append(source)
            if most is not None and len(order) > most + 1:
                return None
        return order[1:]

    def _obtain(self, peek: Peek) -> Tensor:
        if self.tensor is not None:
            return self.tensor
        try:
            made = run(self.replay, peek)
        except RuntimeError as error:
            # Perhaps it is a bias, which plain PyTorch would not have missed: the reader has to be told.
            if MODIFIED not in str(error) or FOR_RECOMPUTING in str(error):
                raise
            raise RuntimeError(f"{error} {FOR_RECOMPUTING}") from None
        for ref, tensor in zip(self.replay.makes, made, strict=False):  # one more may have joined meanwhile
            other = None if ref is None else ref()
            if other is not None and other is not self and other.is_wanted:
                other.take(tensor)
        return self.take(made[self.index])

    @property
    def is_wanted(self) -> bool:
        """Return whether backward will ask for it and it has not been recomputed."""
        return self.tensor is None and self.unused > 0 and self.counter._version == self.version

    def take(self, made: Tensor) -> Tensor:
        """Take in the recomputed storage; keep it if backward asks for it."""
        tensor = self.counter.detach()  # a change in place is noticed there
        tensor.data = made
        if not self.over:
            self.tensor = tensor
            self.engine.enter(self.nbytes)
        return tensor

    def used(self) -> None:
        """Take note that one more of the tensors on it was asked for, for the first time."""
        self.unused -= 1
        if not self.unused and self.tensor is not None:
            self.tensor = None
            self.engine.leave(self.nbytes)


class Dropped:
    """The object that the graph holds in place of a dropped tensor."""

    __slots__ = ("__weakref__", "dtype", "first", "go", "made", "record", "size", "stride", "was_used")

    def __init__(self, tensor: Tensor, made: Recomputed, go: Planned, record: Record | None) -> None:
        made.unused += 1
        self.go = go
        self.made = made
        self.record = record
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.first = int(tensor.storage_offset())
        self.was_used = False

    def changed(self) -> bool:
        """Return whether the tensor has been changed in place since it was saved."""
        return self.made.counter._version != self.made.version

    def view(self, peek: Peek, *, count: bool) -> Tensor:
        """Return the tensor, bit for bit; with `count` this is a use by backward."""
        made = self.made
        tensor = made.obtain(peek)
        if count and not self.was_used:
            self.was_used = True
            made.used()
        return self._of(tensor)

    def look(self, peek: Peek, there: dict[Recomputed, Tensor]) -> Tensor:
        """Return the tensor, bit for bit; recompute it into `there` if it is neither in use nor there."""
        made = self.made
        tensor = there.get(made) if made.tensor is None else made.tensor
        if tensor is None:
            tensor = there[made] = run(made.replay, peek)[made.index]
        return self._of(tensor)

    def _of(self, tensor: Tensor) -> Tensor:
        """Return this tensor as a view of its whole storage."""
        made = self.made
        if (
            tensor.stride() == self.stride
            and tensor.size() == self.size
            and tensor.storage_offset() == self.first
            and tensor.dtype is self.dtype
        ):
            return tensor  # as most are
        view = made.engine.tensors.view
        return view(made.counter, tensor, self.dtype, self.size, self.stride, self.first)
