"""Plans that stand by: while others need the memory bus those for a free one, while it is free those for a loaded one.

To begin with a plan takes a step. To make one takes seconds, and more beside a preprocessing that keeps all cores busy:
by then its input pipeline has starved. So what is to be carried out then is made before. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from torch_tiers.migrator.learning.background import give_up
from torch_tiers.migrator.learning.feedback import Feedback
from torch_tiers.migrator.learning.made import Made, foresee
from torch_tiers.migrator.links import LANES, WORSE, Links
from torch_tiers.migrator.planner.quiet import is_quiet
from torch_tiers.migrator.trace import Trace

LOADED = {"d2h": 0.9, "h2d": 0.8, "bus": 0.8}
"""What is left of each lane where others need the bus; on an H100 beside 100 GB/s of copies 0.94 to 1 and 0.76 to 0.85.
"""

CROWDED = {"d2h": 1.0, "h2d": 1.0, "bus": 1.0}
"""The same where they need the cores above all: beside processes that decoded JPEGs 0.98 to 1 and 0.92 to 1."""

KINDS = (LOADED, CROWDED)  # plans are made ahead for these, one after the other

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
        lanes = [lane for lane in LANES if getattr(self.given, lane)]
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
    alone = foresee(made, traces, now.links.alone)
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


class Standby:
    """What stands by for the plans of one device."""

    def __init__(self) -> None:
        self._ahead: tuple[Ahead, ...] = ()
        self._aside: SetAside | None = None

    def forget(self) -> None:
        """What it all was made for is not so any more."""
        self._drop_aside()
        self.outdated()

    def outdated(self) -> None:
        """Other plans are carried out, or what they are made with was corrected: none were made ahead for that."""
        kept = () if self._aside is None else self._aside.ahead
        for ahead in self._ahead:
            if ahead not in kept:
                give_up(ahead.made)
        self._ahead = ()

    @property
    def has_aside(self) -> bool:
        """Whether plans for a free bus are set aside."""
        return self._aside is not None

    def set_aside(self, made: tuple[Made, ...], planned: tuple[Trace, ...], feedback: Feedback) -> None:
        """Others need the bus from now on: keep the plans that were carried out before, and those made ahead."""
        self._aside = SetAside(made, planned, feedback, self._ahead)

    def take_back(self, links: Links, correction: int) -> SetAside | None:
        """What was set aside if it is for `links`, which is then gone; None also where less fits by now than did."""
        aside = self._aside
        if aside is None or aside.feedback.given != links:
            return None
        if correction < aside.feedback.correction:
            self._drop_aside()
            return None
        self._aside = None
        return aside

    def _drop_aside(self) -> None:
        """What was set aside does not come back, nor is anything of use that is made ahead for it alone."""
        aside, self._aside = self._aside, None
        for ahead in () if aside is None else aside.ahead:
            if ahead not in self._ahead:
                give_up(ahead.made)

    def restore(self, aside: SetAside) -> None:
        """What had been made ahead is good again, as those plans are carried out again that were set aside."""
        self._ahead = aside.ahead

    def due(self, given: Links) -> Links | None:
        """What the next plans are to be made ahead for, once the last ones are there; None where all were made."""
        if given.contended or len(self._ahead) == len(KINDS) or not all(ahead.made.done() for ahead in self._ahead):
            return None
        return given.reduced(KINDS[len(self._ahead)])

    def add(self, made: Future[tuple[Made, ...]], given: Links, links: Links) -> None:
        """Plans are being made ahead for `links`, which were due."""
        self._ahead += (Ahead(made, given, links),)

    def found(self, feedback: Feedback, *, with_aside: bool) -> tuple[Made, ...] | None:
        """What was made ahead and is good for the links that there are; None if nothing is.

        Parameters
        ----------
        with_aside
            Also what was made ahead for the plans that are set aside: others needed the bus already, and need it in
            another way from now on. Once these plans were corrected, that is no better.
        """
        ahead, aside = self._ahead, self._aside
        if with_aside and not ahead and aside is not None and feedback.correction >= aside.feedback.correction:
            ahead = aside.ahead
        return nearest(ahead, feedback.given)
