"""Copies weights that lie in DRAM to a buffer in HBM, ahead of the operators that read them.

What is fetched, and what makes room for it, is chosen as in "A study of integrated prefetching and caching strategies"
(Cao, Felten, Karlin and Li, SIGMETRICS 1995), by the rule that they call aggressive: fetch the next weight that is
missing as soon as there is one in the buffer that is needed later than that; give up the one that is needed last.

Copies are good within one forward, or one backward. So what writes weights between those and is no operator of
PyTorch, such as an optimizer in Triton, never leaves an outdated copy behind. What operators write is told.

What is asked for in vain, or while something is not as it should be, is read where it lies: that is right, and slow.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias
from weakref import ref

import torch
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


class _Choice:
    """Weights that are streamed until others are; their numbers mean them alone.

    Who asks may have looked a number up before the choice changed.
    """

    substitutes: Substitutes

    def __init__(self, weights: Sequence[Weight] = ()) -> None:
        self.weights = weights
        self.order = Order()
        self.copies: dict[int, _Copy] = {}


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
    """

    def __init__(self, compute: Compute, lane: Lane, substitutes: MakeSubstitutes, buffer: Tensor) -> None:
        self.buffer = buffer
        self._compute = compute
        self._lane = lane
        self._make = substitutes
        self._target = buffer.untyped_storage()
        self._room = ExtentMap(buffer.numel(), SLOT)
        self._now = self._choice(())
        self._before: list[_Choice] = []  # that still have copies, as operators were reading them
        self._streams: set[Stream] = set()  # all that were given copies
        # The ends of streams when their last copy was given up: what lay there may be read until then.
        self._last_readers: dict[Stream, Event] = {}
        # The ends of what wrote weights last, as far as that is known; and whoever had the buffer's memory before.
        self._written: dict[Stream, Event] = {compute.stream(): compute.mark(compute.stream())}
        self._reading: deque[tuple[Event, torch.UntypedStorage]] = deque()  # what lanes read must not be unmapped
        self._open = False  # whether a model is within its forward or backward, as long as its holder lives
        self._holder: ref[object] | None = None
        self._is_broken = False  # an exception came in between, such as an interrupt
        # Backwards run in threads of their own. An operator comes without the interpreter's lock, and takes that first,
        # then this one, then the lane's. `Substitutes` has one, too, with which nobody waits for any other. A signal's
        # handler may run a model in the midst of what is done here: it is told by the owner, and gets no copies.
        self._lock = threading.Lock()
        self._owner = 0

    @property
    def weights(self) -> Sequence[Weight]:
        """Those that are streamed."""
        return self._now.weights

    @property
    def nbytes(self) -> int:
        """Bytes of those."""
        return sum(weight.nbytes for weight in self.weights)

    # ------------------------------------------------------------------------------ from the program

    def set_weights(self, weights: Sequence[tuple[Weight, Tensor]]) -> None:
        """From now on stream these, as far as the buffer holds them, and no others; with a tensor on each."""
        self._alone(self._set_weights, [(each, on) for each, on in weights if each.nbytes <= self.buffer.numel()])

    def begin(self, kind: Hashable) -> None:
        """A pass begins: see `Order.begin`."""
        self._alone(self._now.order.begin, kind)

    def resume(self, kind: Hashable) -> None:
        """A pass goes on: see `Order.resume`."""
        self._alone(self._now.order.resume, kind)

    def open(self, holder: object = None) -> None:
        """A forward or a backward begins in this thread, of an outermost module.

        It is over as `close` is called; or as `holder` is gone, which its frame has: an interrupt may keep us from
        hearing of its end.
        """
        self._now.substitutes.include_thread()
        self._alone(self._begin, holder)

    def close(self) -> None:
        """A forward or a backward has ended, in which copies were good."""
        self._alone(self._end)

    def drain(self) -> None:
        """Wait for copies and let go of the weights' memory; not while another thread is at work here."""
        if self._compute.capturing() or not self._lock.acquire(blocking=False):
            return
        self._owner = threading.get_ident()
        try:
            while self._reading:
                self._reading[0][0].synchronize()
                self._reading.popleft()
        finally:
            self._owner = 0
            self._lock.release()

    def end(self) -> None:
        """Stream nothing any more; wait for copies that are under way, and for whoever reads them."""
        self.set_weights(())
        self._lane.close()
        if not self._compute.capturing():
            for stream in self._streams:
                self._compute.mark(stream).synchronize()

    def ask(self, choice: _Choice, number: int, written: bool) -> int:
        """Where an operator that comes by finds a copy; see `Substitutes`."""
        if choice is not self._now or not self._is_open():
            return IN_PLACE
        place = self._alone(self._find, choice, number, written)
        return IN_PLACE if place is None else place

    def _alone(self, do: Callable[..., int | None], *arguments: object) -> int | None:
        me = threading.get_ident()
        if self._owner == me and self._lock.locked():
            return None
        with self._lock:
            self._owner = me
            try:
                return do(*arguments)
            except BaseException:
                self._is_broken = True
                raise
            finally:
                self._owner = 0

    # --------------------------------------------------------------------------------- with the lock

    def _choice(self, weights: Sequence[tuple[Weight, Tensor]]) -> _Choice:
        made = _Choice([weight for weight, _ in weights])
        # Weakly: Python's collector does not see what C++ holds.
        made.substitutes = self._make(partial(place_of_copy, ref(self), ref(made)), self.buffer)
        made.substitutes.set([tensor for _, tensor in weights])
        return made

    def _set_weights(self, weights: Sequence[tuple[Weight, Tensor]]) -> None:
        self._give_up_all()
        self._now.substitutes.close()  # first: a storage has one substitute
        self._collect()
        if self._now.copies:
            self._before.append(self._now)
        self._now = self._choice(weights)

    def _is_open(self) -> bool:
        return self._open and (self._holder is None or self._holder() is not None)

    def _begin(self, holder: object) -> None:
        if self._is_open() or self._compute.capturing():
            return
        if self._open:
            self._give_up_all()
        self._holder = None if holder is None else ref(holder)
        if self._is_broken and not self._mend():
            return
        self._let_go()
        stream = self._compute.stream()
        self._written[stream] = self._compute.mark(stream)  # who knows what was written until now
        self._open = True
        self._fetch_ahead()

    def _let_go(self) -> None:
        """Let go of the memory of weights that were copied by now."""
        while self._reading and self._reading[0][0].query():
            self._reading.popleft()

    def _mend(self) -> bool:
        """Begin with an empty buffer, if nobody reads it; whether that was done."""
        choices = [*self._before, self._now]
        if any(each.substitutes.readers(number) for each in choices for number in range(len(each.weights))):
            return False
        for each in choices:
            each.copies.clear()
        self._before.clear()
        self._room = ExtentMap(self.buffer.numel(), SLOT)
        self._last_readers = {stream: self._compute.mark(stream) for stream in self._streams}
        self._is_broken = False
        return True

    def _find(self, choice: _Choice, number: int, written: bool) -> int:
        if choice is not self._now or not self._is_open() or self._is_broken or self._compute.capturing():
            return IN_PLACE
        copy = choice.copies.get(number)
        if copy is not None and (written or copy.outdated):
            if not self._give_up(choice, number, but_for=1):
                return IN_PLACE
            copy = None
        was_expected = choice.order.read(number)
        copy = copy or self._fetch(number, choice.copies)
        stream = self._compute.stream()
        if copy is not None and stream not in copy.streams:
            self._streams.add(stream)
            copy.streams.add(stream)
            self._compute.wait(copy.ready, "weights", stream)
        if was_expected:  # else the pass goes another way, and what gave way to this copy may not be read, either
            self._fetch_ahead()
        return IN_PLACE if copy is None else copy.place.offset

    def _fetch_ahead(self) -> None:
        copies, order = self._now.copies, self._now.order
        if len(copies) == len(self._now.weights):
            return
        for number in order.coming():
            if number in copies:
                continue
            needed = order.reads_before(number)
            if self._now.weights[number].storage() is None:  # it is gone, and the others are not
                continue
            if self._fetch(number, [each for each in copies if order.reads_before(each) > needed]) is None:
                break

    def _fetch(self, number: int, others: Iterable[int]) -> _Copy | None:
        """Begin to copy a weight; None if there is no room even without `others`, as far as nothing reads them."""
        now = self._now
        weight = now.weights[number]
        storage = weight.storage()
        if storage is None:
            return None
        left = sorted(others, key=now.order.reads_before)
        room = self._room.capacity - self._room.used + sum(now.weights[each].nbytes for each in left)
        if room < weight.nbytes and not self._before:
            return None  # though all of them went
        while (place := self._room.allocate(weight.nbytes)) is None:
            if not self._collect() and not any(self._give_up(now, left.pop()) for _ in range(len(left))):
                return None
        # First: what is written from here on is told when the weight is asked for. The marks have to be behind what was
        # written until then, and the copy behind the marks.
        for stream in now.substitutes.renew(number):
            self._written[stream] = self._compute.mark(stream)
        after = [*self._last_readers.values(), *self._written.values()]
        ready = self._lane.copy([Piece(self._target, place.offset, storage, 0, weight.nbytes)], after)
        self._reading.append((ready, storage))
        copy = now.copies[number] = _Copy(place, ready)
        return copy

    def _give_up(self, choice: _Choice, number: int, *, but_for: int = 0) -> bool:
        """Free the place of a copy, unless operators read it now; whether it is free.

        Whoever asks counts as a reader already: `but_for` that one.
        """
        if choice.substitutes.readers(number) > but_for:
            return False
        copy = choice.copies.pop(number)
        self._room.free(copy.place)
        for stream in copy.streams:
            self._last_readers[stream] = self._compute.mark(stream)
        return True

    def _end(self) -> None:
        if self._open:  # what is read in the next one is not to be copied in this one: no copy lives as long
            self._now.order.end()
        self._give_up_all()

    def _give_up_all(self) -> None:
        self._open = False
        if self._is_broken:  # `_mend` does it
            return
        self._let_go()
        for copy in self._now.copies.values():
            copy.outdated = True
        if not self._compute.capturing():  # into a graph no mark may go
            for number in list(self._now.copies):
                self._give_up(self._now, number)

    def _collect(self) -> bool:
        """Free what choices before this one have, and nobody reads any more; whether there was something."""
        freed = [self._give_up(each, number) for each in self._before for number in list(each.copies)]
        self._before = [each for each in self._before if each.copies]
        return any(freed)


def place_of_copy(streamer: ref[Streamer], choice: ref[_Choice], number: int, written: bool) -> int:
    """Answer what `Substitutes` ask, unless nobody streams any more."""
    asked, of = streamer(), choice()
    return IN_PLACE if asked is None or of is None else asked.ask(of, number, written)
