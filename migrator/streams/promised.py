"""An event of a lane that does not exist yet, as a thread has yet to submit the copy."""

from __future__ import annotations

from concurrent.futures import Future

from torch_tiers.migrator.streams import Event


class PromisedEvent:
    """An event that is not there yet: a thread will ask a lane for it.

    Attributes
    ----------
    lane : str
        What is waited for with it.
    asked : Future
        Done when the thread is through with it: the event of the last copy.
    """

    def __init__(self, lane: str) -> None:
        self.lane = lane
        self.asked: Future[Event | None] = Future()

    def set(self, event: Event | None) -> None:
        """The lane was asked for the last copy; None if there was nothing to copy."""
        self.asked.set_result(event)

    def fail(self, error: BaseException) -> None:
        """The lane was not asked for all copies, because of `error`, and carries none of them out any more."""
        self.asked.set_exception(error)

    @property
    def is_there(self) -> bool:
        """Whether the thread is through with it."""
        return self.asked.done()

    def event(self) -> Event | None:
        """Block the host until the lane was asked; the event of the last copy."""
        return self.asked.result()

    def settled(self) -> Event | None:
        """Block the host until it is known what became of it; the event of the last copy, if all were asked for."""
        return None if self.asked.exception() is not None else self.asked.result()

    def query(self) -> bool:
        """Whether the copies are over; raises what kept the lane from being asked."""
        if not self.is_there:
            return False
        event = self.event()
        return event is None or event.query()

    def synchronize(self) -> None:
        """Block the host until they are."""
        if (event := self.event()) is not None:
            event.synchronize()
