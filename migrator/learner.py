"""Learns a program: which periods to record, what budget their plans are made for, and when to plan anew.

Pure: it is fed traces and peaks and hands back plans.

A trace that tells what else lies in HBM is planned for the target itself. For one that does not, the budget
is the room that the rest of the program leaves, and is found by feedback. A period's peak is that of the
program's own memory plus the saved bytes that were in HBM at that moment. One more byte of room raises the
peak by one byte at most, so the room may always grow by what the peak lies below the target, and shrinks by
what it lies above. It grows by half of that at a time: memory that is reserved in fragments is not in the
peak, and shows only when the allocator has to flush its cache; then the room has found its ceiling. The
first estimate takes the learning period's peak as if nothing saved had been part of it.
"""

from __future__ import annotations

from migrator.links import PCIE_GEN5, Links
from migrator.plan import Plan
from migrator.policies import Policy
from migrator.trace import Trace

PERIODS_AFTER_DRIFT = 4  # recorded when something unforeseen was saved: programs alternate between kinds of periods
LONGEST_PAUSE = 128  # periods
KINDS = 8  # kinds of periods that are remembered
PATIENCE = 3  # periods without an optimizer step after which the program is taken to have none
PRESSED = 0.03  # of the target: what the room gives back when the allocator was pressed
SETTLED = 0.02  # of the target: closer than this the room stays as it is


class Learner:
    """Decides over the periods of one device.

    Parameters
    ----------
    policy : Policy
        Makes the plans.
    target : int
        The peak to aim for, in bytes.
    links : Links
        What the policy takes the lanes to give.
    """

    def __init__(self, policy: Policy, target: int, links: Links = PCIE_GEN5) -> None:
        self._policy = policy
        self._target = target
        self._links = links
        self._traces: dict[frozenset[str], Trace] = {}
        self._room: int | None = None  # for saved tensors, before any correction; from the first trace on
        self._correction = 0  # of what the policy is given, found by feedback
        self._ceiling: int | None = None  # the largest correction that no period so far has found too large
        self._to_record = 1
        self._periods = 0
        self._steady = 0  # periods as foreseen since the last drift
        self._pause = PERIODS_AFTER_DRIFT  # from one look at a drift to the next, longer each time
        self._look_again = 0
        self.plans: tuple[Plan, ...] = ()

    @property
    def records_next(self) -> bool:
        """Whether the next period is to be recorded."""
        return self._to_record > 0

    def period_over(self, trace: Trace | None, peak: int, *, whole: bool, drifted: bool, pressed: bool) -> bool:
        """Take in one period; whether `plans` changed.

        Parameters
        ----------
        trace : Trace or None
            What was recorded, if it was.
        peak : int
            Highest use of HBM in the period, in bytes.
        whole : bool
            Whether everything that lives as long as the program existed when the period began: the
            optimizer makes its state in the first step, so peaks before that are too low.
        pressed : bool
            Whether the allocator had to flush its cache to stay within the budget.
        drifted : bool
            Whether a tensor was saved that no plan knows, or one was not that a plan relies on.
        """
        self._periods += 1
        if not (whole or self._periods >= PATIENCE):
            return False
        if trace is not None and trace.sites:
            self._to_record -= 1
            return self._learn(trace, peak)
        if not drifted:
            self._steady += 1
            if self._steady > self._pause:
                self._pause = PERIODS_AFTER_DRIFT
        elif self._periods >= self._look_again:
            # A program that is new in every period (routing, shapes) must not be recorded in every period.
            self._steady = 0
            self._to_record = PERIODS_AFTER_DRIFT
            self._look_again = self._periods + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        return self._correct(peak, pressed)

    def _learn(self, trace: Trace, peak: int) -> bool:
        kind = frozenset(site.key for site in trace.sites)
        before = self._traces.pop(kind, None)
        # Of two periods of one kind that differ in size, the plan must fit the larger.
        self._traces[kind] = before if before is not None and before.saved_bytes > trace.saved_bytes else trace
        while len(self._traces) > KINDS:
            del self._traces[next(iter(self._traces))]
        if self._room is None:
            self._room = max(0, self._target - peak)
        self._plan()
        return True

    def _correct(self, peak: int, pressed: bool) -> bool:
        slack = -int(PRESSED * self._target) if pressed else self._target - peak
        if self._room is None or abs(slack) <= SETTLED * self._target:
            return False
        if slack < 0:
            # A program may alternate between kinds of periods: the largest must fit, and it comes again.
            correction = self._ceiling = max(-self._base, self._correction + slack)
        elif any(plan.groups for plan in self.plans):
            highest = self._target - self._base if self._ceiling is None else self._ceiling
            correction = min(self._correction + slack // 2, highest)
        else:
            return False
        if correction == self._correction:
            return False
        self._correction = correction
        self._plan()
        return True

    @property
    def _base(self) -> int:
        """The largest budget that a trace is planned for, before any correction."""
        return max((self._before_correction(trace) for trace in self.traces), default=0)

    def _before_correction(self, trace: Trace) -> int:
        return self._target if trace.others else self._room or 0

    def relink(self, links: Links) -> bool:
        """From now on plan with `links`; whether `plans` changed."""
        if links == self._links:
            return False
        self._links = links
        self._plan()
        return bool(self.plans)

    def forget(self) -> None:
        """Begin anew: what was learned cannot be carried out."""
        self._traces.clear()
        self.plans = ()
        self._room = None
        self._correction = 0
        self._ceiling = None
        self._to_record = 1

    def _plan(self) -> None:
        budgets = (max(0, self._before_correction(trace) + self._correction) for trace in self.traces)
        self.plans = tuple(
            self._policy(trace, budget, self._links) for trace, budget in zip(self.traces, budgets, strict=True)
        )

    @property
    def traces(self) -> tuple[Trace, ...]:
        """One trace per kind of period, the one recorded last at the end; a plan each in `plans`."""
        return tuple(self._traces.values())
