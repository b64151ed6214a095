"""Records the operators that a thread runs: one record at a time, one thread at a time.

From `begin` to `end` every operator that the thread calls is recorded, and those of the backwards that it runs,
whichever threads these take. Not those of its other threads: what they make comes from nowhere, and what they write has
been written unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from torch_tiers.allocator.extensions.extension import CannotBuild
from torch_tiers.migrator.tape import check, native
from torch_tiers.migrator.tape.clock import OperatorClock
from torch_tiers.migrator.tape.closure import POISON, Closure, Differs, Packs, Refused, Stops, closure
from torch_tiers.migrator.tape.compiled import Compiled
from torch_tiers.migrator.tape.tape import Tape

TAPE = "tape"  # what `Compiled` is installed for, besides its clock


class Recorder:
    """The recorder of this process.

    Attributes
    ----------
    clock : OperatorClock
        What operators take a device.
    pause, resume : callable
        Nothing that this thread does is recorded until `resume` is given what `pause` returned. Neither takes longer
        than a call.
    settings : callable
        Which of PyTorch's settings there are that change which kernels run, or how, as one number.
    unseen : callable
        Given a tensor: its bytes were written by what is no operator; given None: those of any may be.
    effects : callable
        Given an operator's name and overload: which arguments it writes, whether it may draw random numbers, whether
        other ranks take part, and when the host waits (0: never, 1: always, 2: if a mask is among its indices, 3: if it
        copies between devices and is not asked to go on).
    """

    def __init__(self, library: native.Recorder) -> None:
        self._native = library
        self.pause: Callable[[], bool] = library.pause
        self.resume: Callable[[bool], None] = library.resume
        self.settings: Callable[[], int] = library.settings
        self.unseen: Callable[[Tensor | None], None] = library.unseen
        self.effects: Callable[[str, str], tuple[list[int], bool, bool, int]] = library.effects
        self._compiled = Compiled(library)
        self.clock = OperatorClock(library, self._compiled)

    @property
    def is_recording(self) -> bool:
        """Whether a record is under way, in any thread."""
        return self._native.is_recording()

    def begin(self, *, states: bool = False) -> bool:
        """Record from now on; False if another thread is recording.

        With `states`, what the host's generators are in before each random operator is copied: 5 kB a time.
        """
        if not self._native.begin(states):
            return False
        self._compiled.remove(TAPE)  # a fork has what its parent installed
        self._compiled.install(TAPE)
        return True

    def end(self) -> Tape | None:
        """What was recorded; None where nothing was. In the thread that began, outside of any mode."""
        record = self._native.end()
        self._compiled.remove(TAPE)
        return None if record is None else Tape.read(self._native, record)

    def stop(self) -> None:
        """Record no more, and forget what was recorded; in any thread. Closures stay good."""
        self._native.end()
        self._compiled.remove(TAPE)

    def stops(self) -> Stops:
        """Room for values that somebody promises to have, of the record under way."""
        return Stops(self._native)

    def packs(self) -> Packs:
        """Room for what is packed of tensors, of the record under way."""
        return Packs(self._native)

    def closure(
        self, targets: Sequence[Tensor], stops: Stops | None = None, relative: Sequence[tuple[int, int]] = ()
    ) -> Closure | Refused:
        """What makes tensors again, as they are now; or why there is no such thing.

        While a record is under way, in the thread that records, or in a backward of its; afterwards see
        `Tape.closure`.

        Parameters
        ----------
        targets
            That will be wanted.
        stops
            Values that will be there. Parameters that change within a record are to be among them.
        relative
            More of them, as a plan has them from one record to the next: for each, how many operators before that which
            made the newest target, and which of that operator's outputs.
        """
        return closure(self._native, None, targets, stops, relative)

    def verify(self, closure: Closure, originals: Sequence[Tensor]) -> bool:
        """Run it, and tell whether what it makes has the bytes of the originals.

        Memory that no operator writes is filled with something else, so that it shows. The host waits for the device.
        A result is dropped before the next is compared.
        """
        try:
            made = closure.run(poison=POISON)
        except Differs:
            return False
        made.reverse()
        return len(made) == len(originals) and all(self._native.is_same(made.pop(), each) for each in originals)

    @contextmanager
    def untracked(self) -> Iterator[None]:
        """What is done inside is not the program's."""
        was = self.pause()
        try:
            yield
        finally:
            self.resume(was)


def obstacle(cache_dir: Path) -> str | None:
    """What keeps it from being had in `cache_dir`, without building it; None if nothing is known to."""
    return native.MODULE.obstacle(cache_dir)


def load(cache_dir: Path) -> Recorder | str:
    """The recorder, built if it has not been, and found to be true; or what keeps it from being so."""
    try:
        recorder = Recorder(native.load(native.MODULE.build(cache_dir)))
        check.check(recorder)
    except (CannotBuild, check.Untrue) as reason:
        return str(reason)
    return recorder
