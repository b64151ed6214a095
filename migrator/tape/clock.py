"""Device times of operators, by events around each; see `native/clock.h`."""

from __future__ import annotations

from torch_tiers.migrator.tape import native
from torch_tiers.migrator.tape.compiled import Compiled

CLOCK = "clock"  # what `Compiled` is installed for


class OperatorClock:
    """The clock of this process; `migrator.streams.OperatorClock`.

    Parameters
    ----------
    library : native.Recorder
        The module.
    compiled : Compiled
        Has nothing timed within what is compiled, and that as a whole.
    """

    def __init__(self, library: native.Recorder, compiled: Compiled) -> None:
        self._native = library
        self._compiled = compiled

    def begin(self, device: int, stream: int) -> OperatorTimes | None:
        """Time what runs on that stream of a GPU from now on; None while somebody else's is timed."""
        number = self._native.clock_begin(device, stream)
        return OperatorTimes(number, self._native, self._compiled) if number else None


class OperatorTimes:
    """Times operators, until its end or for as long as somebody has it.

    Parameters
    ----------
    number : int
        What the clock calls it.
    """

    def __init__(self, number: int, library: native.Recorder, compiled: Compiled) -> None:
        self._number = number
        self._native = library
        self._compiled = compiled
        self.tick = library.clock_tick
        compiled.install(CLOCK)

    def end(self) -> list[float]:
        """Seconds of operators in each stretch, once the device is through with them; none after an end."""
        return self._end(is_wanted=True)

    def drop(self) -> None:
        """Nobody wants to know. Idempotent."""
        self._end(is_wanted=False)

    def _end(self, *, is_wanted: bool) -> list[float]:
        number, self._number = self._number, 0
        if not number:
            return []
        self._compiled.remove(CLOCK)
        return self._native.clock_end(number, is_wanted)

    def __del__(self) -> None:
        self.drop()
