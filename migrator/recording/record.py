"""The object that the graph holds beside a saved tensor while the iteration is recorded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from torch_tiers.migrator.recompute.replays import Peek
from torch_tiers.migrator.recompute.trials import Trial, Trials
from torch_tiers.migrator.recording.storages import Known


class Recording(Protocol):
    """The recorder of the iteration, as records see it."""

    trials: Trials | None

    def ask(self, known: Known | None) -> int:
        """Go on to the position at which backward asks for a tensor; return its number."""

    def resume(self, *, brought: bool = False) -> None:
        """Take note that our own work at a position is over."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Record:
    """One saved tensor's entry in the trace, and its trials, whose inputs nobody else may keep alive."""

    recorder: Recording
    known: Known | None
    uses: list[int]
    trials: list[Trial] = field(default_factory=list)

    def used(self) -> None:
        """Take note that backward asks for the tensor."""
        self.uses.append(self.recorder.ask(self.known))

    def compare(self, tensor: Tensor, peek: Peek) -> Tensor:
        """Run the tensor's trials against the tensor that backward is about to be given; return that."""
        trials, self.trials = self.trials, []
        for trial in trials:
            if self.recorder.trials is not None:
                self.recorder.trials.attempt(trial, tensor, peek)
        self.recorder.resume(brought=True)
        return tensor
