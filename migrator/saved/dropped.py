"""Saved tensors that are dropped, and recomputed when backward asks for them.

The graph holds a `Dropped` in place of such a tensor. It refers to a `Recomputed`, shared by the tensors on one
storage, and that to the packed inputs of a replay: those that moved are fetched first, those that were dropped are
recomputed first. So what is needed to recompute a tensor lives as long as the tensor is part of the graph, whatever
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
    """What a plan says of the site at which something was dropped."""

    @property
    def mover(self) -> _Owner: ...  # noqa: D102
    @property
    def pace(self) -> Pace | None: ...  # noqa: D102


class Recomputed:
    """The memory of dropped tensors that share a storage, while it is there."""

    __slots__ = ("__weakref__", "counter", "engine", "index", "nbytes", "replay", "tensor", "unused", "version")

    def __init__(self, base: Tensor, replay: Replay, index: int, engine: Engine) -> None:
        self.counter = engine.tensors.counter(base)
        self.version = self.counter._version
        self.nbytes = base.nbytes  # all of its storage
        self.replay = replay
        self.index = index  # in what that makes
        replay.makes[index] = weakref.ref(self)
        self.engine = engine
        self.unused = 0  # dropped tensors on it that backward has not asked for yet
        self.tensor: Tensor | None = None

    @property
    def over(self) -> bool:
        """Whether all on it have been used: who asks again (retain_graph) has it made anew, and nobody keeps it."""
        return self.tensor is None and not self.unused

    def obtain(self, peek: Peek) -> Tensor:
        """All of it, as one tensor; recomputed if need be, and kept until the last one on it has been used once."""
        if self.tensor is None and any(type(packed) is Dropped for packed in self.replay.inputs):
            for made in reversed(self.sources() or ()):
                made._obtain(peek)
        return self._obtain(peek)

    def sources(self, most: int | None = None) -> list[Recomputed] | None:
        """What it is made from that is not there and will be kept, and what that is made from.

        None if that is more than `most`. One after the other: a chain of hundreds, as of a recurrent network, exceeds
        how deep Python's calls may go.
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
        """Whether backward will ask for it, and it is not there."""
        return self.tensor is None and self.unused > 0 and self.counter._version == self.version

    def take(self, made: Tensor) -> Tensor:
        """All of it was made; kept, if backward asks for it."""
        tensor = self.counter.detach()  # a change in place is noticed there
        tensor.data = made
        if not self.over:
            self.tensor = tensor
            self.engine.entered(self.nbytes)
        return tensor

    def used(self) -> None:
        """One more of the tensors on it was asked for, for the first time."""
        self.unused -= 1
        if not self.unused and self.tensor is not None:
            self.tensor = None
            self.engine.left(self.nbytes)


class Dropped:
    """What the graph holds in place of a saved tensor that is recomputed."""

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
        """Whether what was saved has been changed in place since."""
        return self.made.counter._version != self.made.version

    def view(self, peek: Peek, *, count: bool) -> Tensor:
        """The tensor, bit for bit; with `count` it has been asked for."""
        made = self.made
        tensor = made.obtain(peek)
        if count and not self.was_used:
            self.was_used = True
            made.used()
        return self._of(tensor)

    def look(self, peek: Peek, there: dict[Recomputed, Tensor]) -> Tensor:
        """The tensor, bit for bit, recomputed where it is neither in use nor `there`, and then put there."""
        made = self.made
        tensor = there.get(made) if made.tensor is None else made.tensor
        if tensor is None:
            tensor = there[made] = run(made.replay, peek)[made.index]
        return self._of(tensor)

    def _of(self, tensor: Tensor) -> Tensor:
        """Its part of what all of its storage is."""
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
