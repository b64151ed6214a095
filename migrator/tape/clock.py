"""What the operators of one device take it, by events around each; see `native/clock.h`."""

from __future__ import annotations

from torch_tiers.migrator.tape import native
from torch_tiers.migrator.tape.compiled import Compiled


class OperatorClock:
    """The clock of this process; `migrator.lanes.OperatorClock`.

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
        """Time what runs on that stream of a GPU from now on; None while it times another GPU's."""
        if not self._native.clock_begin(device, stream):
            return None
        return OperatorTimes(self._native, self._compiled)


class OperatorTimes:
    """Times operators until its end."""

    def __init__(self, library: native.Recorder, compiled: Compiled) -> None:
        self._native = library
        self._compiled = compiled
        self._ended = False
        self.tick = library.clock_tick
        compiled.install(self)

    def end(self) -> list[float]:
        """Seconds of operators in each stretch, once the device is through with them. To be called once."""
        self._ended = True
        self._compiled.remove(self)
        return self._native.clock_end()

    def __del__(self) -> None:
        if not self._ended:  # nobody wants to know: the clock is free again
            self.end()
