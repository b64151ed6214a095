"""What the graph holds beside a saved tensor of an iteration that is recorded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from torch_tiers.migrator.recompute.replays import Peek
from torch_tiers.migrator.recompute.trials import Trial, Trials
from torch_tiers.migrator.recording.storages import Known


class Recording(Protocol):
    """The recorder of the iteration."""

    trials: Trials | None

    def advance(self) -> int:
        """A position is reached; its number."""

    def resume(self, *, brought: bool = False) -> None:
        """Our own work at a position is over."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Record:
    """What the graph holds of an entry; and of its trials, whose inputs nobody else may keep alive."""

    recorder: Recording
    known: Known | None
    uses: list[int]
    trials: list[Trial] = field(default_factory=list)

    def used(self) -> None:
        """Backward asks for it."""
        self.uses.append(self.recorder.advance())

    def compare(self, tensor: Tensor, peek: Peek) -> Tensor:
        """Carry its trials out, with what backward is about to be given; returns that."""
        trials, self.trials = self.trials, []
        for trial in trials:
            if self.recorder.trials is not None:
                self.recorder.trials.attempt(trial, tensor, peek)
        self.recorder.resume(brought=True)
        return tensor
