"""Plans that stand by: while others need the memory bus those for a free one, while it is free those for a loaded one.

To begin with a plan takes a step. To make one takes seconds, and more beside a preprocessing that keeps all cores busy:
by then its input pipeline has starved. So what is to be carried out then is made before. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from migrator.learning.feedback import Feedback
from migrator.learning.made import Made, foresee
from migrator.links import WORSE, Links
from migrator.planner.quiet import is_quiet
from migrator.trace import Trace

LOADED = {"d2h": 0.9, "h2d": 0.8, "bus": 0.8}
"""What is left of each lane where others need the bus; on an H100 beside 100 GB/s of copies 0.94 to 1 and 0.76 to 0.85.
"""

CROWDED = {"d2h": 1.0, "h2d": 1.0, "bus": 1.0}
"""The same where they need the cores above all: beside processes that decoded JPEGs 0.98 to 1 and 0.92 to 1."""

SLOWER = 0.01  # of a step: what others may make it longer by, of plans that stay


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

    def is_good_for(self, links: Links) -> bool:
        """Whether the plans are there, and others need the bus, and leave not much less of it than they count on."""
        if not links.contended or not self.made.done() or self.made.exception() is not None:
            return False
        if (links.below, links.dram) != (self.links.below, self.links.dram):
            return False
        return max(self._less(links)) <= WORSE

    def distance(self, links: Links) -> float:
        """How far `links` are from what the plans count on, as a part of what there usually is of a lane."""
        return max(map(abs, self._less(links)))

    def _less(self, links: Links) -> list[float]:
        """By how much less there is of each lane, as that part."""
        lanes = [lane for lane in ("d2h", "h2d", "disk_write", "disk_read") if getattr(self.given, lane)]
        return [(getattr(self.links, lane) - getattr(links, lane)) / getattr(self.given, lane) for lane in lanes]


def nearest(ahead: Iterable[Ahead], links: Links) -> tuple[Made, ...] | None:
    """Of what was made ahead and is good for `links`, what counts on most nearly these; None if nothing is."""
    good = [each for each in ahead if each.is_good_for(links)]
    return min(good, key=lambda each: each.distance(links)).made.result() if good else None


def staying(
    made: tuple[Made, ...], traces: tuple[Trace, ...], before: Feedback, now: Feedback
) -> tuple[Made, ...] | None:
    """Plans that may stay as they are though others need the memory bus, or leave less of it than before.

    They move little: so they do if they were made for others, or if they are quiet. And they are hardly slower for all
    that others take. To make others takes seconds, and to begin with them steps.

    Returns
    -------
    what they come to now; None if others are to be made
    """
    given, links = before.given, now.given
    if not links.contended or (links.below, links.dram) != (given.below, given.dram) or links.gives_more_than(given):
        return None
    if not given.contended and not all(_is_quiet(each, links) for each in made):  # first, as to simulate takes longer
        return None
    foreseen = foresee(made, traces, now.links)
    alone = foresee(made, traces, replace(now.links.alone, costs=now.links.costs))
    for each, without in zip(foreseen, alone, strict=True):
        if each.predicted is None or without.predicted is None:
            return None
        if each.predicted.seconds > without.predicted.seconds * (1 + SLOWER):
            return None
    return foreseen


def _is_quiet(made: Made, links: Links) -> bool:
    return made.predicted is not None and is_quiet(made.plan, links, made.predicted.seconds)


@dataclass(frozen=True, slots=True)
class SetAside:
    """Plans for links that may come back, what they were made for, what was found of both, and what was made ahead."""

    made: tuple[Made, ...]
    planned: tuple[Trace, ...]
    feedback: Feedback
    ahead: tuple[Ahead, ...]
