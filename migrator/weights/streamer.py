"""Copies weights that lie in DRAM to a buffer in HBM, ahead of the operators that read them.

What is fetched, and what makes room for it, is chosen as in "A study of integrated prefetching and caching strategies"
(Cao, Felten, Karlin and Li, SIGMETRICS 1995), by the rule that they call aggressive: fetch the next weight that is
missing as soon as there is one in the buffer that is needed later than that; give up the one that is needed last.

Copies are good from the begin of a model's forward to the end of its backward, or of the forward if there are no
gradients. So what writes weights between steps and is no operator of PyTorch, such as an optimizer in Triton, never
leaves an outdated copy behind. What operators write is told.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from torch_tiers.allocator.extents import Extent, ExtentMap
from torch_tiers.migrator.streams import Compute, Event, Lane, Stream
from torch_tiers.migrator.streams.pieces import SLOT, Piece
from torch_tiers.migrator.tape.substitutes import Substitutes
from torch_tiers.migrator.weights.order import Order
from torch_tiers.migrator.weights.weight import Weight

MakeSubstitutes: TypeAlias = Callable[[Callable[[int, bool], int], Tensor], Substitutes]

IN_PLACE = -1  # what `Substitutes` takes for: no copy


@dataclass(eq=False, slots=True)
class _Copy:
    """A weight's copy: its place in the buffer, when it is there, and the streams that have been given it."""

    place: Extent
    ready: Event
    outdated: bool = False
    streams: set[Stream] = field(default_factory=set)


class Streamer:
    """Streams the weights of one device. Thread-safe.

    Parameters
    ----------
    compute : Compute
        The program's streams.
    lane : Lane
        Copies to the device.
    substitutes : callable
        Makes `Substitutes`, given what they ask and the buffer.
    buffer : Tensor
        Flat, of uint8, in HBM: where the copies lie. All of a storage.

    Attributes
    ----------
    weights : sequence of Weight
        Those that are streamed.
    """

    def __init__(self, compute: Compute, lane: Lane, substitutes: MakeSubstitutes, buffer: Tensor) -> None:
        self._compute = compute
        self._lane = lane
        self.buffer = buffer
        self._target = buffer.untyped_storage()
        self._room = ExtentMap(buffer.numel(), SLOT)
        self._order = Order()
        self.weights: Sequence[Weight] = ()
        self._copies: dict[int, _Copy] = {}
        # The ends of streams when their last copy was given up: what lay there may be read until then.
        self._behind: dict[Stream, Event] = {}
        self._written: dict[Stream, Event] = {}  # the end of what wrote weights last, as far as that is known
        self._open = False  # whether a model is within its forward or backward
        # Backwards run in threads of their own. Reentrant: a signal's handler may run a model.
        self._lock = threading.RLock()
        self._substitutes = substitutes(self._ask, buffer)

    @property
    def nbytes(self) -> int:
        """Bytes of those."""
        return sum(weight.nbytes for weight in self.weights)

    def stream(self, weights: Sequence[Weight]) -> None:
        """From now on stream these, as far as the buffer holds them, and no others. Between two passes only."""
        with self._lock:
            self._give_up_all()
            self._order = Order()
            fit = [weight for weight in weights if weight.nbytes <= self.buffer.numel()]
            alive = [(weight, tensor) for weight in fit if (tensor := weight.tensor()) is not None]
            self.weights = [weight for weight, _ in alive]
            self._substitutes.set([tensor for _, tensor in alive])

    def begin(self, kind: Hashable) -> None:
        """A pass begins: see `Order.begin`."""
        with self._lock:
            self._order.begin(kind)

    def open(self) -> None:
        """A forward or a backward begins in this thread, of an outermost module."""
        self._substitutes.include_thread()
        with self._lock:
            if self._open or self._compute.capturing():
                return
            self._open = True
            stream = self._compute.stream()
            self._written = {stream: self._compute.mark(stream)}  # who knows what was written until now
            self._fetch_ahead()

    def close(self) -> None:
        """A backward has ended, or a forward without gradients; or another forward begins."""
        with self._lock:
            self._open = False
            self._give_up_all()

    def end(self) -> None:
        """Stream nothing any more; wait for copies that are under way."""
        with self._lock:
            self.close()
            self.weights = ()
            self._substitutes.set([])
        self._lane.close()

    def _ask(self, number: int, written: bool) -> int:
        with self._lock:
            if not self._open or self._compute.capturing():
                return IN_PLACE
            stream = self._compute.stream()
            copy = self._copies.get(number)
            if copy is not None and (written or copy.outdated):
                if not self._give_up(number, but_for=1):
                    return IN_PLACE
                copy = None
            self._order.read(number)
            copy = copy or self._fetch(number, self._copies)
            if copy is not None and stream not in copy.streams:
                self._compute.wait(copy.ready, "weights", stream)
                copy.streams.add(stream)
            self._fetch_ahead()
            return IN_PLACE if copy is None else copy.place.offset

    def _fetch_ahead(self) -> None:
        until = self._order.until
        for number in self._order.coming():
            if number in self._copies:
                continue
            needed = until(number)
            if self._fetch(number, [each for each in self._copies if until(each) > needed]) is None:
                break

    def _fetch(self, number: int, others: Iterable[int]) -> _Copy | None:
        """Begin to copy a weight; None if there is no room even without `others`, as far as nothing reads them."""
        weight = self.weights[number]
        storage = weight.storage()
        if storage is None:
            return None
        left = sorted(others, key=self._order.until)
        while (place := self._room.allocate(weight.nbytes)) is None:
            if not any(self._give_up(left.pop()) for _ in range(len(left))):
                return None
        for stream in self._substitutes.renew(number):
            self._written[stream] = self._compute.mark(stream)
        piece = Piece(self._target, place.offset, storage, 0, weight.nbytes)
        ready = self._lane.copy([piece], [*self._behind.values(), *self._written.values()])
        copy = self._copies[number] = _Copy(place, ready)
        return copy

    def _give_up(self, number: int, *, but_for: int = 0) -> bool:
        """Free the place of a copy, unless operators read it now, `but_for` so many; whether it is free."""
        if self._substitutes.readers(number) > but_for:
            return False
        copy = self._copies.pop(number)
        self._room.free(copy.place)
        for stream in copy.streams:
            self._behind[stream] = self._compute.mark(stream)
        return True

    def _give_up_all(self) -> None:
        for number, copy in list(self._copies.items()):
            copy.outdated = True
            self._give_up(number)
