"""Records the operators that a thread runs: one record at a time, one thread at a time.

From `begin` to `stop` every operator that the thread calls is recorded, and those of the backwards that it runs,
whichever threads these take. Not those of its other threads: what they make comes from nowhere, and what they write has
been written unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from torch_tiers.allocator.extensions.extension import CannotBuild
from torch_tiers.migrator.tape import check, native
from torch_tiers.migrator.tape.clock import OperatorClock
from torch_tiers.migrator.tape.closure import Packs
from torch_tiers.migrator.tape.compiled import Compiled

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
    """

    def __init__(self, library: native.Recorder) -> None:
        self._native = library
        self.pause: Callable[[], bool] = library.pause
        self.resume: Callable[[bool], None] = library.resume
        self.settings: Callable[[], int] = library.settings
        self._compiled = Compiled(library)
        self.clock = OperatorClock(library, self._compiled)

    @property
    def is_recording(self) -> bool:
        """Whether a record is under way, in any thread."""
        return self._native.is_recording()

    def begin(self) -> bool:
        """Record from now on; False if another thread is recording."""
        if not self._native.begin():
            return False
        self._compiled.remove(TAPE)  # a fork has what its parent installed
        self._compiled.install(TAPE)
        return True

    def stop(self) -> None:
        """Record no more, and forget what was recorded; in any thread. Closures stay good."""
        self._native.end()
        self._compiled.remove(TAPE)

    def hide_views(self) -> None:
        """Record no views from now on: they compute nothing. Nobody may record, or have recorded in another thread."""
        self._native.show_views(False)

    @contextmanager
    def with_views(self) -> Iterator[None]:
        """Record views, too, in this scope: with them what is `listed` is all that ran. For tests; see `hide_views`."""
        self._native.show_views(True)
        try:
            yield
        finally:
            self._native.show_views(False)

    def listed(self) -> list[tuple[str, list[tuple[int, ...]]]] | None:
        """The operators so far, each with the shapes of what it returned; None where nothing is recorded, or not truly.

        Without views, unless these are recorded. Of what is no plain tensor there is no shape.
        """
        return self._native.listed()

    def packs(self) -> Packs:
        """Room for what is packed of tensors, of the record under way."""
        return Packs(self._native)

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


@cache
def _prepared(library: Path) -> native.Recorder:
    """Load the recorder, check it, and have it record no views: once, before any thread can record."""
    loaded = native.load(library)
    recorder = Recorder(loaded)
    check.check(recorder)
    recorder.hide_views()
    return loaded


def load(cache_dir: Path) -> Recorder | str:
    """The recorder, built if it has not been, and found to be true; or what keeps it from being so."""
    try:
        return Recorder(_prepared(native.MODULE.build(cache_dir)))
    except (CannotBuild, check.Untrue) as reason:
        return str(reason)
