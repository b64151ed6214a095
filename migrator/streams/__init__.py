"""Lanes and the compute stream: the only part of the migrator that uses CUDA streams and events.

A *lane* is one direction of the link between HBM and DRAM. It takes copies, executes them in order beside the program,
and returns an event for each. *Compute* is the program's own stream. Both exist twice. On a GPU (`cuda`) they are CUDA
streams, and nothing here ever blocks the host. Without one (`host`) a lane is a thread, host memory plays HBM, and a
wait of the compute stream is a wait of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from torch_tiers.allocator.sizes import MiB
from torch_tiers.migrator.model.clocks import Clocks
from torch_tiers.migrator.model.timing import IterationTime
from torch_tiers.migrator.streams.pieces import Piece
from torch_tiers.migrator.telemetry.transfers import Transfer

TIMED = 32  # copies between two calls of `Lane.over`: enough to tell
TIMED_EVERY = 64 * MiB  # copied, at least, between two that are timed: that costs a lane 3 us on an H100, 1/400 of it

Stream = Hashable
"""One of the program's streams."""


class Event(Protocol):
    """A point in the order of a lane or of the compute stream."""

    def query(self) -> bool:
        """Whether it has been passed."""

    def synchronize(self) -> None:
        """Block the host until it has been passed; raises what the work before it raised."""


class TimedEvent(Event, Protocol):
    """An event of a stream, that tells when it was passed."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this one to another; both must have been passed."""


Gap: TypeAlias = tuple[TimedEvent, TimedEvent]
"""When a stream got to a wait, and when it went on."""


class Lane(Protocol):
    """One direction of one link."""

    def copy(self, pieces: Iterable[Piece], after: Sequence[Event], behind: Stream = None) -> Event:
        """Copy every piece once all events of `after` have been passed; the event says when it is done.

        And once the program's stream `behind`, if there is one, is through with all that it was given so far.
        """

    def over(self, since: Event) -> list[Transfer]:
        """Copies that ended since this was last called, as far as they were timed; times count from `since`.

        That must have been passed. At most `TIMED` between two calls are timed, of those that run at the lane's
        speed: none of small pieces. On a GPU at most one in `TIMED_EVERY` bytes.
        """

    def close(self) -> None:
        """Wait for what was submitted and end."""


class Peaks(Protocol):
    """Tells the most bytes that were in use: of iterations, and of the parts of an iteration that are measured."""

    def take_peak(self, *, with_present: bool = ...) -> int:
        """The most since the last call, or now.

        What is in use now need not count the next time, unless this is called `with_present`.
        """

    def restart(self) -> tuple[int, int]:
        """Begin a new peak, at what is in use; the one since the last restart, and what `retries` tells."""

    def delayed(self) -> float:
        """Seconds that requests have waited so far, in all threads, while memory was taken from the device."""

    def retries(self) -> int:
        """How often the allocator gave back what it had cached, as there was no room."""


class Memory(NamedTuple):
    """The allocator of a GPU's memory.

    Attributes
    ----------
    peaks : Peaks
        Of what it hands out.
    untracked : callable
        A scope in which this thread asks for memory that the program alone would not, and frees all of it.
    tidy : callable
        Returns what that took to the system, as far as it is cached.
    renew : callable
        Returns all that is cached to the system.
    """

    peaks: Peaks
    untracked: Callable[[], AbstractContextManager[None]] = nullcontext
    tidy: Callable[[], None] = lambda: None
    renew: Callable[[], None] = lambda: None


class OperatorTimes(Protocol):
    """Times the operators of a stream."""

    def tick(self, stream: int, /) -> None:
        """The next stretch begins, on that stream."""

    def end(self) -> list[float]:
        """Seconds of operators in each stretch, once the device is through with them; none where that is not known."""

    def drop(self) -> None:
        """Nobody wants to know."""


class OperatorClock(Protocol):
    """What times operators, of one GPU at a time."""

    def begin(self, device: int, stream: int) -> OperatorTimes | None:
        """Time what runs on that stream of a GPU from now on; None while somebody else's is timed."""


class Measures(NamedTuple):
    """An iteration's `times`, `seconds`, `others` and `clocks`; see `migrator.model.trace.Trace`.

    With clocks, the times are those of the device by itself.
    """

    times: tuple[float, ...]
    seconds: float
    others: tuple[int, ...]
    clocks: Clocks | None = None


class Meter(Protocol):
    """Measures one iteration; see `migrator.streams.meter`."""

    def mark(self) -> Any:
        """A point in the program's time."""

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds from one point to another, once the device has passed both."""

    def tick(self, resident: int) -> None:
        """A position is reached; `resident` bytes of saved storages have been in HBM since the one before."""

    def arrive(self, *, outside: bool = ...) -> None:
        """Stop counting host time as the program's: a hook has begun, perhaps `outside` of positions."""

    def depart(self) -> None:
        """Count host time as the program's again; `resume` does so, too."""

    def part(self, resident: int) -> None:
        """Take note that saved storages were released within a stretch; `resident` bytes had been in HBM until then."""

    def abandon(self) -> None:
        """Stop measuring: nobody will ask for the result."""

    def resume(self, *, brought: bool = False) -> None:
        """Our own work at a position is over, in which something was `brought` back, or released.

        What that did to memory belongs to neither stretch beside it.
        """

    def untracked(self) -> AbstractContextManager[None]:
        """Do work in this scope that is not measured as the program's."""

    def most(self) -> int:
        """Return the most bytes in use since the last call, in an untracked scope; 0 if nobody counts them."""

    def others_so_far(self, resident: int) -> int:
        """Return the most HBM in use so far without saved storages, of which `resident` are there now, in bytes.

        0 before the first position, and if nobody counts it.
        """

    def finish(self, resident: int, held: Sequence[int]) -> Measures:
        """The iteration is over; waits until the device has passed its end.

        `held` says for every stretch how many bytes of saved storages that are not `resident` the program held.
        """


class Compute(Protocol):
    """The program's own stream on one device.

    Attributes
    ----------
    device : torch.device
        That device.
    counts : bool
        Whether its allocator tells what is in use: else it is what was counted of what is saved, tensor by tensor.
    operators : OperatorClock or None
        What its meters may time operators with.
    """

    device: torch.device
    counts: bool
    operators: OperatorClock | None

    def empty(self, nbytes: int) -> torch.Tensor:
        """HBM that may be written once `mark` (taken afterwards) has been passed."""

    def stream(self) -> Stream:
        """The stream the program is on now. What is true of one stream says nothing about another."""

    def mark(self, stream: Stream) -> Event:
        """The end of everything that `stream` was given so far."""

    def wait(self, event: Event, cause: str, stream: Stream) -> None:
        """Let `stream` go on only after `event`; what it waits counts as a stall of `cause`."""

    def time_waits(self, iterations: int) -> None:
        """Let the waits of the iteration that begins stand for those of so many iterations; 0: do not time them.

        Where waits are not events of a stream, all of them are timed.
        """

    def outlast(self, event: Event, stream: Stream) -> None:
        """Memory of `stream` that a lane reads until `event` is about to be freed."""

    def hand_over(self, buffer: torch.Tensor) -> None:
        """Tell the allocator that `buffer` is used on the present stream as well as on its own."""

    def untracked(self) -> AbstractContextManager[None]:
        """Let this thread ask for memory that the program alone would not, in this scope, and free all of it."""

    def capturing(self) -> bool:
        """Whether the program is being captured into a graph, which no lane may become a part of."""

    def tidy(self) -> None:
        """Free what is cached for untracked work alone, at the end of an iteration. Not within a capture."""

    def renew(self) -> None:
        """Other plans are carried out from now on: what is cached fits those before, and goes. Not within a capture.

        Else it goes when HBM is full, in the middle of a step, from between what is in use; and what is then taken anew
        lies in pieces for good: after two changes of plans a GPT's allocator went on flushing, step after step.
        """

    def settle(self) -> IterationTime | None:
        """End an iteration; return the time of the last one that the device has finished, or None if not timed."""

    def end_resting_iteration(self) -> None:
        """While hooks rest: count the waits of the iteration that ends, and time those of the next one."""

    def idle(self) -> bool:
        """Return whether the device has finished the last iteration; not within a capture."""

    def when(self, event: Event, recorded: float) -> float:
        """Where on the host's clock times that lanes count from `event` begin; to within a millisecond or so.

        It must have been passed, and was put into its stream not before `recorded`.
        """

    def close(self) -> None:
        """No more iterations: add up the waits of those that are over by now."""

    def allocated(self) -> int:
        """Bytes of HBM in use now, without what is cached; 0 where nobody counts them."""

    def meter(self, *, held: bool = False) -> Meter:
        """A meter of what happens from now on; where there is a device, it may be `held` back behind the host."""

    def peak(self, resident: int) -> int:
        """The most that was in use since this was last called; `resident` is the most of it that was saved bytes."""

    def pass_by(self, *, counts: bool) -> None:
        """Count the peak since the last iteration, or the last call, towards the next iteration only if it `counts`.

        An evaluation between two iterations does not: it finds the room that saved tensors take later.
        """

    def pressed(self) -> bool:
        """Whether the allocator had to give up cached memory to stay within the budget since this was last called."""

    def reserved(self) -> int:
        """The most HBM that was ever taken from the device, cached memory included."""
