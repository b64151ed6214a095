"""Plans that stand by: while others need the memory bus those for a free one, while it is free those for a loaded one.

To begin with a plan takes a step. To make one takes seconds, and more beside a preprocessing that keeps all cores busy:
by then its input pipeline has starved. So what is to be carried out then is made before. Pure.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from migrator.learning.feedback import Feedback
from migrator.learning.made import Made
from migrator.links import WORSE, Links
from migrator.trace import Trace

LOADED = {"d2h": 0.9, "h2d": 0.8, "bus": 0.8}
"""What is left of each lane where others need the bus; on an H100 beside 100 GB/s of copies 0.94 to 1 and 0.76 to 0.85.
"""


@dataclass(frozen=True, slots=True)
class Ahead:
    """Plans made ahead for less than there is of the links.

    Attributes
    ----------
    made
        The plans, which need not be there yet.
    given
        The links while nobody else needs the bus.
    links
        What the plans count on.
    """

    made: Future[tuple[Made, ...]]
    given: Links
    links: Links

    def take(self, links: Links) -> tuple[Made, ...] | None:
        """The plans, if they are there and good for `links`: others need the bus, and leave not much less of it."""
        if not links.contended or not self.made.done() or self.made.exception() is not None:
            return None
        if (links.below, links.dram) != (self.links.below, self.links.dram):
            return None
        lanes = [lane for lane in ("d2h", "h2d", "disk_write", "disk_read") if getattr(self.given, lane)]
        less = (getattr(self.links, lane) - getattr(links, lane) for lane in lanes)
        usual = (getattr(self.given, lane) for lane in lanes)
        far = any(missing > WORSE * of for missing, of in zip(less, usual, strict=True))
        return None if far else self.made.result()


@dataclass(frozen=True, slots=True)
class SetAside:
    """Plans for links that may come back, what they were made for, what was found of both, and what was made ahead."""

    made: tuple[Made, ...]
    planned: tuple[Trace, ...]
    feedback: Feedback
    ahead: Ahead | None
