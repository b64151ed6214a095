"""The movers of one thread: one for each device on which it saves tensors, and all of them in the same iteration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from torch_tiers.migrator.program.sites import Place
from torch_tiers.migrator.recording.recorder import Recorder
from torch_tiers.migrator.saved.actions import Action
from torch_tiers.migrator.saved.mover import Mover

LOOKS = 16
"""Forwards in a row without a backward after which an iteration is no longer recorded."""

UNRECORDED = 2
"""Iterations in a row that may end so: programs that begin each one with such forwards are to have plans, too."""

GROWTH = 64
"""How many times what waits for a backward an iteration may save: a graph that is never used must not keep it open."""


class Movers:
    """The movers of one thread; `make` is `make_mover` of `migrator.saved.saver.Saver`."""

    def __init__(self, make: Callable[[torch.device], Mover | None], place: Place[Action]) -> None:
        self.by_device: dict[torch.device, Mover | None] = {}  # on which anything was saved
        self._make = make
        self._place = place  # where the thread is; whether its iteration is recorded is decided here
        self._looks = 0  # forwards in a row, while recording, through which no backward went
        self._unrecorded = 0  # iterations in a row of which nothing was recorded for that

    @property
    def armed(self) -> list[Mover]:
        """Return the movers there are."""
        return [mover for mover in self.by_device.values() if mover is not None]

    @property
    def _recorders(self) -> list[Recorder]:
        movers = self.by_device.values()
        return [mover.recorder for mover in movers if mover is not None and mover.recorder is not None]

    def add(self, device: torch.device) -> None:
        """Have the mover of a device made."""
        mover = self.by_device[device] = self._make(device)
        self._place.recording |= mover is not None and mover.recorder is not None

    def replace(self, device: torch.device) -> None:
        """Have another mover made for a device, whose budget has changed. Call it between two iterations."""
        before = self.by_device[device]
        assert before is not None
        before.record_no_more()
        self.add(device)
        if (mover := self.by_device[device]) is not None:
            mover.follow(before)

    def disarm(self) -> None:
        """Do without movers from now on."""
        for recorder in self._recorders:
            recorder.abandon()
        self.by_device = {}
        self._make = lambda device: None
        self._place.recording = False

    def capturing(self) -> bool:
        """Return whether the program is being captured into a CUDA graph."""
        return any(mover.engine.compute.capturing() for mover in self.armed)

    def begin_iteration(self) -> None:
        """Record the iteration that begins if any mover does; the program goes on."""
        recorders = self._recorders
        self._place.recording = bool(recorders)
        for recorder in recorders:
            recorder.depart()

    def backward_came(self) -> None:
        """Take note that an iteration is over whose backward has begun."""
        if self._place.recording and self._looks < LOOKS:
            self._unrecorded = 0
        self._looks = 0

    def was_early(self, module: str) -> bool:
        """Return whether the backward that began last was an early one, by what is recorded; see `EarlyBackwards`.

        Parameters
        ----------
        module : str
            The module that saves a tensor after it.
        """
        recorders = self._recorders
        saved, waited = sum(recorder.saved for recorder in recorders), sum(recorder.waited for recorder in recorders)
        waiting = sum(recorder.waiting() for recorder in recorders)
        begins_anew = any(recorder.first_module == module for recorder in recorders)
        return waiting > waited / 2 and waiting > saved / GROWTH and not begins_anew

    def forget_dead_forward(self) -> None:
        """Restart the iteration if all that it saved is dead: its forward raised, or no backward followed.

        This happens only while an iteration is recorded. Then the recorder knows what is dead; and only then does it
        matter: a trace with sites that do not come again leads to plans that wait for them. After `LOOKS` such forwards
        in a row recording stops for this iteration: a program that only looks at outputs would be ten times slower as
        long as it does.
        """
        if not self._place.recording or self._place.in_backward:
            return
        dead = False
        for mover in self.armed:
            if mover.recorder is None:
                continue
            if mover.forward_is_dead():
                mover.begin_again()
                self._place.iteration += 1
                dead = True
            else:
                dead |= mover.recorder.forward_begins()
        self._looks = self._looks + 1 if dead else 0
        if self._looks == LOOKS and self._unrecorded < UNRECORDED:
            self._unrecorded += 1
            for mover in self.armed:
                mover.record_no_more()
            self._place.recording = False

    @contextmanager
    def untracked(self) -> Iterator[None]:
        """Do work of torch-tiers itself in this scope: it is not measured as the program's."""
        with ExitStack() as stack:
            for mover in self.armed:
                if mover.recorder is not None and not mover.engine.compute.capturing():
                    stack.enter_context(mover.recorder.untracked())
            yield

    def arrive(self, *, outside: bool = False) -> None:
        """Stop counting host time as the program's: a hook has begun, perhaps `outside` of positions."""
        for recorder in self._recorders:
            recorder.arrive(outside=outside)

    def depart(self) -> None:
        """Count host time as the program's again: a hook is over, whatever it has recorded."""
        for recorder in self._recorders:
            recorder.depart()

    @contextmanager
    def between(self) -> Iterator[None]:
        """Do work in this scope whose host time is not the program's, and which is not recorded."""
        self.arrive(outside=True)
        try:
            yield
        finally:
            self.depart()
