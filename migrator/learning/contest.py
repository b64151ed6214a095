"""A contest of two plans: of what nobody can predict, periods tell which plan is faster.

What moving costs compute besides the link depends on the program and on the GPU. On an H100 a busy lane
cost a GPT one or two percent, on an H200 nothing. No one set of `Costs` suits both, and by what it is wrong policies
hardly differ. So once a plan has settled, a *rival* is made with the other costs, and carried out if it may be
worth it. The faster is kept, and what it was made with are the costs from then on.

The rival has to win clearly, and against two rounds of the holder's: hosts that others use change their speed by two
within seconds. And cards that get warm slow down, by 1 to 2% in the first ten seconds, less and less, so that whoever
comes last seems slower: where the holder's rounds tell of that, and the rival loses by little, it is held against the
holder's rounds before and after its own. A card at its power limit makes laps longer and shorter, by 0.7%: there their
median tells what they take. By the shortest ones, which tell it where others use the host, a plan that was 1% faster
won 30 of 100 contests, and by medians 74 (54 contests out of laps of a GPT on H100s). With noise alone, and no card
that gets warm, one that is 0.5% slower wins 1 in 100, and one that is as fast 16, which costs nothing. Where the
holder's laps are alike the host is quiet, and if the rival's are not, that is its own doing: one that moved 3.6 GiB
took 269 to 295 ms where its holder took 272 to 280, and was slower, but for its shortest laps. It has to win by both.
And such a card rings: the periods in which plans change are half idle, after which laps are up to 6% shorter and longer
by turns, for about ten. So a round waits for laps that are alike, for as long as another round at most.

No round is right after a change of plans, nor while the rival is made, which takes processors. Pure: who has plans made
and carried out is for the caller to say.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from statistics import median
from typing import NamedTuple

from torch_tiers.allocator.sizes import format_size
from torch_tiers.migrator.learning.background import give_up
from torch_tiers.migrator.learning.feedback import SETTLING
from torch_tiers.migrator.learning.made import Made, make_all
from torch_tiers.migrator.links import HARDLY, MEASURED, Costs, Links
from torch_tiers.migrator.plan import Plan
from torch_tiers.migrator.policies import Policy
from torch_tiers.migrator.simulator import simulate
from torch_tiers.migrator.timing import Lap
from torch_tiers.migrator.trace import Trace

log = logging.getLogger("tiers")

LAPS = 9  # of a round: its last ones
MOST = 2 * LAPS  # after which it is over, alike or not
ENDS = 2  # of these, as many of the shortest and of the longest may be anything
STEADY = 0.02  # of a lap: by no more the others differ where the median counts
BEST = 3  # where they do, the shortest count: the host makes some longer, and nothing makes one shorter
ALIKE = 0.01  # of a lap: if these differ by more, they tell nothing; nor do rounds of a plan
MARGIN = 0.002  # of a lap: by how much the rival has to be shorter
WORTH = 0.004  # of the step: what a rival has to promise, as to try it costs some periods
SPARE = 0.01  # of the budget, for the rival: its peak is predicted, and that of the holder was corrected
PATIENCE = 36  # periods in which a round has to be over: without a GPU there are no laps
MAKING = 4096  # periods in which a rival has to be made
TRIES = 3  # races that may be broken off


class Round:
    """What periods under one plan took, the last ones.

    A lap may be of the period before, and what the allocator caches fits the plan before: the first few do not count.
    """

    def __init__(self) -> None:
        self.periods = 0
        self.seconds: deque[float] = deque(maxlen=LAPS)
        self._settling = SETTLING
        self._laps = 0

    @property
    def is_over(self) -> bool:
        """Whether it can be compared with another."""
        late = self._laps >= MOST or self.periods >= PATIENCE
        return len(self.seconds) == LAPS and (late or _are_alike(self.seconds))

    @property
    def failed(self) -> bool:
        """Whether there were periods enough, and too few of them told what they took."""
        return self.periods >= PATIENCE and not self.is_over

    def period_over(self, lap: Lap | None) -> None:
        """Take in a period, and the lap that came with it."""
        self.periods += 1
        if lap is None:
            return
        if self._settling:
            self._settling -= 1
        else:
            self.seconds.append(lap.seconds)
            self._laps += 1

    def disturbed(self) -> None:
        """What came so far, and what comes right now, tells nothing."""
        self.seconds.clear()
        self._settling, self._laps = SETTLING, 0


class _Close(NamedTuple):
    """A rival that lost by so little that it may have been the card, and what it is to be compared by."""

    rival: Made
    laps: Sequence[float]
    before: Sequence[Sequence[float]]  # the holder's rounds


class Contest:
    """One contest between the plan that there is, the holder, and its rival; another one only after `renew`.

    Parameters
    ----------
    costs : Costs
        What the holder is made with.
    ask : callable
        Has `make_rival` done with the costs that it is given.

    Attributes
    ----------
    costs : Costs
        What plans are to be made with.
    """

    def __init__(self, costs: Costs, ask: Callable[[Costs], Future[tuple[Made, ...]]]) -> None:
        self.costs = costs
        self._others = MEASURED if costs == HARDLY else HARDLY
        self._ask = ask
        self._over = False
        self._tries = 0  # races since the program was another one
        self._round = Round()  # of the plan that is carried out
        self._rounds: list[Sequence[float]] = []  # the holder's that are over
        self._asked: Future[tuple[Made, ...]] | None = None
        self._rival: Made | None = None  # once it is made, until it is carried out
        self._close: _Close | None = None  # while the holder's round after it lasts
        self.holder: Made | None = None  # while its rival is carried out

    @property
    def is_over(self) -> bool:
        """Whether the plan stays that is carried out."""
        return self._over and self.holder is None and self._close is None

    @property
    def racing(self) -> bool:
        """Whether the rival is carried out."""
        return self.holder is not None

    @property
    def planning(self) -> bool:
        """Whether a rival is being made."""
        return self._asked is not None and not self._asked.done()

    def rearranged(self) -> None:
        """Memory is asked for in another order from now on: the first periods tell nothing, as after another plan."""
        self._round, self._close = Round(), None

    def renew(self) -> None:
        """The program is another one: there may be a contest again."""
        self._over, self._tries = False, 0

    def adopted(self) -> None:
        """There is another holder."""
        self._round, self._rounds = Round(), []
        give_up(self._asked)
        self._asked = self._rival = self._close = self.holder = None

    def withdraw(self) -> Made | None:
        """Break it off; the holder, if it is to come back. Nothing is decided by that, so there may be another race."""
        holder = self.holder
        if holder is not None:
            self._over = self._tries >= TRIES
        self.adopted()
        return holder

    def period_over(self, made: Made, lap: Lap | None, *, drifted: bool = False, pressed: bool = False) -> Made | None:
        """Take in one period; what is to be carried out from now on, if that was decided in it.

        Parameters
        ----------
        made : Made
            What was carried out.
        lap : Lap, optional
            What this period took, or the one before it.
        drifted : bool
            Whether something departed from the plan.
        pressed : bool
            Whether there was too little HBM.
        """
        self._round.period_over(lap)
        if drifted:
            self._round.disturbed()
            self._close = None  # its rounds are no neighbours any more
        if self.holder is not None:
            # What the allocator caches fits the plan before, at first.
            unfit = drifted or (pressed and self._round.periods > SETTLING)
            return self._decide(made, unfit=unfit) if unfit or self._round.is_over or self._round.failed else None
        if self._asked is not None:
            self._take_over(self._asked)
        elif self._close is not None:
            return self._decide_by_both(self._close)
        elif not self._over:
            return self._next_round(made)
        return None

    def _next_round(self, holder: Made) -> Made | None:
        """After the holder's first round have a rival made, after the second have that carried out."""
        self._over = self._round.failed
        if not self._round.is_over:
            return None
        self._rounds.append(self._round.seconds)
        self._round = Round()
        if self._rival is None:
            self._asked = self._ask(self._others)
            return None
        self._over, self.holder = True, holder
        self._tries += 1
        return self._rival

    def _take_over(self, asked: Future[tuple[Made, ...]]) -> None:
        """Take the rival over, if it was made by now."""
        if not asked.done():
            self._over = self._round.periods >= MAKING
            if self._over:
                give_up(asked)
                self._asked = None
            return
        self._asked, self._round = None, Round()
        if (error := asked.exception()) is not None:  # there is a plan: no program ends for want of another
            log.info("no rival to the plan could be made: %r", error)
        elif made := asked.result():
            (self._rival,) = made
        self._over = self._rival is None

    def _decide(self, rival: Made, *, unfit: bool) -> Made | None:
        holder, rounds, now = self.holder, self._rounds, self._round.seconds
        assert holder is not None
        self.adopted()
        wins = not unfit and beats(now, *rounds)
        if not (wins or unfit) and is_close(now, rounds):
            self._close = _Close(rival, now, rounds)
        log.info(
            "contest: a plan that moves %s took %s, its rival that moves %s %s%s; %s",
            format_size(holder.plan.moved_bytes),
            _told(*rounds),
            format_size(rival.plan.moved_bytes),
            _told(now),
            " and did not fit" if unfit else "",
            "the rival takes its place" if wins else "once more the first" if self._close else "the first plan stays",
        )
        return self._won(rival) if wins else holder

    def _decide_by_both(self, close: _Close) -> Made | None:
        """After the holder's round after it, whether the rival was faster than the two around its own."""
        if self._round.failed:
            self.adopted()
        if not self._round.is_over:
            return None
        after = self._round.seconds
        self.adopted()
        wins = beats_between(close.laps, close.before, after)
        log.info(
            "contest: before and after its rival, which took %s, the plan took %s and %s; %s",
            *map(_told, (close.laps, close.before[-1], after)),
            "the rival takes its place" if wins else "it stays",
        )
        return self._won(close.rival) if wins else None

    def _won(self, rival: Made) -> Made:
        self.costs, self._others = self._others, self.costs
        return rival


def may_be(made: Sequence[Made], links: Links) -> bool:
    """Whether there may be a contest of these plans, one for each kind of period, with another.

    Of several kinds laps do not say whose they are. And where others need the memory bus, what is fastest now tells
    nothing of later.
    """
    if len(made) != 1 or links.contended:
        return False
    (holder,) = made
    return holder.predicted is not None and holder.refused is None and not holder.plan.keeps_everything


def make_rival(
    policy: Policy, trace: Trace, budget: int, correction: int, links: Links, holder: Made
) -> tuple[Made, ...]:
    """The plan made with the costs of `links`, if it is worth to be carried out beside `holder`; else nothing.

    It has to do something else, to fit wherever the holder does, and to be faster if its costs are the right ones.
    """
    (rival,) = make_all(policy, (trace,), (budget,), correction - int(SPARE * budget), links, must_fit=False)
    assert rival.predicted is not None
    gain = simulate(trace, links, holder.plan).seconds - rival.predicted.seconds
    fits = (
        rival.refused is None
        and rival.peak() <= max(rival.asked, holder.peak())
        and rival.plan.parcel_bytes <= max(links.below, holder.plan.parcel_bytes)
    )
    is_worth_it = fits and gain > WORTH * rival.predicted.ideal and _does(rival.plan) != _does(holder.plan)
    return (rival,) if is_worth_it else ()


def beats(rival: Sequence[float], *holder: Sequence[float]) -> bool:
    """Whether a rival with these laps, in seconds, is clearly faster than the holder, in each round with those."""
    periods = periods_of(rival, *holder)
    if periods is None or not _is_shortest(periods):
        return False
    return not _are_alike(*holder) or _is_shortest([median(laps) for laps in (rival, *holder)])


def _is_shortest(periods: Sequence[float]) -> bool:
    """Whether the first, the rival's, is clearly shorter than all others."""
    return all(periods[0] < other * (1 - MARGIN) for other in periods[1:])


def is_close(rival: Sequence[float], holder: Sequence[Sequence[float]]) -> bool:
    """Whether a rival lost because the card slows down, perhaps: by less than it can be, and the holder's rounds do."""
    periods = periods_of(rival, holder[0], holder[-1])
    if periods is None:
        return False
    one, first, second = periods
    if not MARGIN < second / first - 1 < ALIKE:
        return False
    return 1 - ALIKE < one / second < (1 + ALIKE / 2) * (1 - MARGIN)


def beats_between(rival: Sequence[float], before: Sequence[Sequence[float]], after: Sequence[float]) -> bool:
    """Whether a rival is clearly faster than its holder, which slows down, was by then.

    The two rounds on both sides of the rival's are twice as far apart as the first two, at most. A card that slows down
    less and less does so by no more than twice as much between them: more is something else. And that all are told by
    their shortest laps is of use only where the host was busy from the first round on.
    """
    if _are_alike(*before) and not _are_alike(rival, after):
        return False
    periods = periods_of(rival, before[0], before[-1], after)
    if periods is None:
        return False
    one, first, second, last = periods
    steady = 0 <= last - second <= min(2 * (second - first) + MARGIN * second, ALIKE * second)
    return steady and one < (second + last) / 2 * (1 - MARGIN)


def periods_of(*rounds: Sequence[float]) -> list[float] | None:
    """What a period takes in each of these rounds, in seconds and by the same measure; None where laps do not tell."""
    each = [sorted(laps) for laps in rounds]
    if min(map(len, each)) < BEST:
        return None
    if _are_alike(*rounds):
        return [median(laps) for laps in each]
    if all(laps[BEST - 1] <= laps[0] * (1 + ALIKE) for laps in each):
        return [median(laps[:BEST]) for laps in each]
    return None


def _are_alike(*rounds: Iterable[float]) -> bool:
    """Whether the laps of each round are such that their median tells."""
    each = map(sorted, rounds)
    return all(len(laps) > 2 * ENDS and laps[-1 - ENDS] <= laps[ENDS] * (1 + STEADY) for laps in each)


def _does(plan: Plan) -> tuple[frozenset[str], frozenset[str]]:
    """What a plan moves, and recomputes."""
    moves = frozenset(key for group in plan.groups for key in group.sites)
    return moves, frozenset(plan.recompute)


def _told(*rounds: Sequence[float]) -> str:
    periods = periods_of(*rounds)
    if periods is None:
        return "nobody knows how long"
    took = f"{median(periods) * 1e3:.2f} ms a period"
    return took if _are_alike(*rounds) else f"{took} at best, {median(map(median, rounds)) * 1e3:.2f} in the median"
