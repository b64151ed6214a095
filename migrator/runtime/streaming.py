"""Tells the streamers of weights where forwards and backwards begin and end, and when nobody else runs a model."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torch_tiers.migrator.runtime.devices import Devices
from torch_tiers.migrator.runtime.models import Models
from torch_tiers.migrator.runtime.options import Options
from torch_tiers.migrator.runtime.streamed_weights import StreamedWeights
from torch_tiers.migrator.telemetry.counters import Counters
from torch_tiers.migrator.weights.streamer import Streamer

_graph_task = torch._C._current_graph_task_id


class Within:
    """A thread is within a model's call, or a backward, as long as this lives: the frame of that has it.

    An interrupt may keep the end of a call from us, and never keeps the frame.
    """

    __slots__ = ("__weakref__",)


class _Thread(threading.local):
    within: weakref.ref[Within] | None = None  # if it has no hooks
    forward: weakref.ref[Within] | None = None  # of an outermost module, which a backward may interrupt
    expected: weakref.ref[Within] | None = None  # what the frame of a call has, if that is an outermost module's

    @property
    def is_within(self) -> bool:
        return self.within is not None and self.within() is not None


class Streaming:
    """The passes of a program, for the weights that are streamed.

    Parameters
    ----------
    options, models, devices, counters
        As `StreamedWeights` takes them.
    others : callable
        Returns the number of other threads that train.
    """

    def __init__(
        self,
        options: Callable[[], Options],
        models: Models,
        devices: Devices,
        counters: Counters,
        others: Callable[[], int],
    ) -> None:
        self._options = options
        self._models = models
        self._weights = StreamedWeights(options, models, devices, counters, self.moving)
        self._others = others
        self._thread = _Thread()
        self._within: weakref.WeakSet[Within] = weakref.WeakSet()  # threads without hooks
        # Held while weights are chosen and move, so that no thread comes to be within a model meanwhile. One for both,
        # and reentrant: a signal's handler may run a model.
        self._entering = threading.RLock()
        # Of what runs with gradients: whether the next forward begins a pass, the pass's kind, and whether any backward
        # ran yet. As long as none did, each forward is a pass.
        self._pass_over, self._kind, self._differentiates = True, (0, True), False
        self._budget_changed = False  # since anything was chosen
        self._seen: dict[int, weakref.ref[nn.Module]] = {}  # models, by identity, as long as they live

    @property
    def active(self) -> bool:
        """Whether any weights are streamed."""
        return bool(self._weights.streamers)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights that are streamed."""
        return sum(streamer.nbytes for streamer in self._streamers)

    @property
    def _streamers(self) -> tuple[Streamer, ...]:
        return tuple(self._weights.streamers.values())

    def hbm_saved(self, device: torch.device) -> int:
        """Bytes of streamed weights, which need no HBM, less those of the buffer for their copies."""
        streamer = self._weights.streamers.get(device)
        return 0 if streamer is None else streamer.nbytes - streamer.buffer.numel()

    @contextmanager
    def moving(self) -> Iterator[bool]:
        """A scope in which weights and state may move, if it yields True.

        While they move they are mapped nowhere, and no other thread's kernels may read them.
        """
        with self._entering:
            yield self._others() == 0 and len(self._within) - self._thread.is_within == 0

    # ----------------------------------------------------------------------- threads without hooks

    def enter(self, module: nn.Module) -> Within | None:
        """A module is called in a thread without hooks; if `leave` is to be called when it ends, what it is to hold."""
        if self._thread.is_within or _is_no_pass():
            return None
        if not self.active and self._options().pages() is None and module in self._models:
            return None
        within = self.expect()
        with self._entering:
            self._within.add(within)
            self._thread.within = weakref.ref(within)
        try:
            self.see(module)
            self.forward_begins(module)
        except BaseException:
            self._left()
            raise
        return within

    def leave(self, *, outermost: bool) -> None:
        """The call of a module has ended in this thread, perhaps of one that no other has called."""
        if outermost and _graph_task() == -1:
            self._thread.forward = None
            self._left()
            self._close()

    def _left(self) -> None:
        if self._thread.within is not None and (within := self._thread.within()) is not None:
            with self._entering:
                self._within.discard(within)
                self._thread.within = None

    # --------------------------------------------------------------------------- begins and ends

    def see(self, module: nn.Module) -> bool:
        """Choose what is streamed where that may change, and return whether it may.

        That is where this outermost module is new, or trains for the first time, or the budget is another.
        """
        with self._entering:
            changes = self._models.add(module, trains=torch.is_grad_enabled()) or self._budget_changed
            if changes:
                self._budget_changed = False  # first: another thread may say so from here on
                try:
                    self._weights.choose()
                except BaseException:  # an interrupt, perhaps
                    self._models.forget(module)
                    self._budget_changed = True
                    raise
                key = id(module)
                self._seen[key] = weakref.ref(module, lambda _: self._gone(key))
        return changes

    def budget_changed(self) -> None:
        """Take note that a device has another budget: what is streamed is chosen anew when the next forward begins."""
        self._weights.give_way_no_more()
        self._budget_changed = True

    def relieve(self, device: torch.device, nbytes: int) -> bool:
        """Stream frozen weights when the next forward begins, as plans lack so much room; return whether that helps."""
        if helps := self._weights.give_way(device, nbytes):
            self._budget_changed = True
        return helps

    def _gone(self, key: int) -> None:
        """A model is gone, and its memory is to be, too. Called wherever it dies, so this waits for no other thread."""
        self._seen.pop(key, None)
        self._weights.drain()

    def expect(self) -> Within:
        """A module is called in this thread, perhaps an outermost one; what the call's frame is to have."""
        within = Within()
        self._thread.expected = weakref.ref(within)
        return within

    def forward_begins(self, root: nn.Module) -> None:
        """The forward of an outermost module begins in this thread, by a call that was expected."""
        if not self.active or _is_capturing():
            return
        trains = torch.is_grad_enabled()
        begins, kind = not trains or self._pass_over, (id(root), trains)
        self._close()
        if begins:
            with self._entering:
                if not self._weights.are_whole:
                    self._weights.choose()
                for device in tuple(self._weights.streamers):
                    # Where it trains, the end of a step has weights move.
                    self._weights.follow(device, may_move=not trains and self._thread.is_within)
        if begins and trains:
            self._kind = kind
        for streamer in self._streamers:
            if begins:
                streamer.begin(kind)
            else:
                streamer.resume(self._kind)
        self._thread.forward = self._thread.expected
        if self._thread.forward is not None and (within := self._thread.forward()) is not None:
            self._open(within)
        if trains:
            self._pass_over = not self._differentiates

    def backward_begins(self) -> Within | None:
        """A backward begins in this thread, perhaps within another; what its frame is to have."""
        if not self.active or _graph_task() != -1:
            return None
        for streamer in self._streamers:
            streamer.resume(self._kind)
        within = Within()
        self._open(within)
        return within

    def backward_over(self) -> None:
        """It has ended, also when it raised."""
        if self.active and _graph_task() == -1:
            self._close()
            self._differentiates = self._pass_over = True
            if self._thread.forward is not None and (forward := self._thread.forward()) is not None:
                self._open(forward)

    def stepping(self) -> None:
        """An optimizer is about to step, perhaps within a backward."""
        if self.active and _graph_task() == -1:
            self._close()

    def stepped(self) -> None:
        """The optimizer has stepped that ends a period, and a pass with it."""
        self._pass_over = True

    def _open(self, within: Within) -> None:
        for streamer in self._streamers:
            streamer.open(within)

    def _close(self) -> None:
        for streamer in self._streamers:
            streamer.close()

    def forked(self) -> None:
        """Give up in a forked child process: weights are read where they lie."""
        self._parents = self._weights.streamers  # whose streams and events are not ours to destroy
        self._weights.streamers = {}

    def close(self) -> None:
        """Stream nothing any more; wait for copies that are under way."""
        self._weights.close()


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _is_no_pass() -> bool:
    """Whether what runs now is part of a backward, of a transform of `torch.func`, or goes into a graph."""
    func: Any = torch._C._functorch
    return _graph_task() != -1 or func.peek_interpreter_stack() is not None or _is_capturing()
