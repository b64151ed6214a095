"""Corrects the budget by what lay in HBM: by peaks, and by what the allocator had no room for. Pure.

If a trace has measured what else lies in HBM, the plan is made for the target itself. If not, the budget is the room
that the rest of the program leaves; the first estimate assumes that nothing saved was part of the first iteration's
peak. From then on both are corrected.

- A peak above the target reduces the budget at once. A peak below the prediction raises it by halves, but never past a
  ceiling: a budget that was found too large. If no peak is predicted, because the rest of HBM was not measured, the
  room for saved tensors grows by half of the gap to the target: one more byte of room raises the peak by one byte at
  most.
- The peak of the first iteration under a plan tells nothing where one was predicted: what the iteration before left is
  still in HBM.
- An allocator that flushed its cache had too little room, whatever the peak: fragments are not in it. So had one that
  tells of bytes for which HBM had no room, period after period; that reduces the budget as long as it helps, and a few
  times at most. Of a period with several iterations the first that ends tells.
"""

from __future__ import annotations

from torch_tiers.allocator.sizes import format_size
from torch_tiers.migrator.controller.outcome import IterationOutcome
from torch_tiers.migrator.model.trace import Trace

SURE = 8  # of the last iterations under the plans there are: so many make sure of what these need
PRESSED = 0.03  # of the target: by so much the budget is cut when the allocator flushed its cache
SETTLED = 0.02  # of the target: closer than this the budget stays as it is
SETTLING = 3  # iterations under new plans in which the allocator may flush: what it caches fits the plans before
TELLING = 2  # peaks under new plans that tell what is left free: where lengths alternate, one may be short
CUTS = 3  # of the budget for flushes, and as many for overflow, after which these are not the plan's
SPILLS = 2  # periods in a row that memory was laid out for, and for which HBM had no room: lengths may alternate
WITHOUT = 8  # periods under new plans after which those count, too, that memory was not laid out for: it may never be
PRESSES = 4  # of the last SURE iterations with a flush: there is too little room, and by then the pace is known
GROWTHS = 2  # times that the budget of a plan whose peak was predicted grows: each costs a plan, and steps to settle
WORTH = 0.08  # of the target: what a growth must bring


class Budget:
    """The budget that plans are made for, with its correction.

    Parameters
    ----------
    target : int
        The peak to aim for, in bytes.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.free = 0  # bytes of the target that plans leave free in any case
        self.sizes_vary = False  # then none is given what a smaller iteration left free: the plan is for the largest
        self.correction = 0  # in bytes
        # Not `PlansInForce.iterations`: this begins anew when memory is asked for in another order, too, and what ends
        # while plans are made, or is refused, is not looked at.
        self.looked_at = 0  # iterations, since the allocator's cache changed or the correction did
        self._periods = 0  # that have ended under the present plans
        self._room: int | None = None  # for saved tensors, from the first peak on
        self._ceiling: int | None = None  # the largest correction that no iteration so far has found too large
        self._growths = 0
        self._good: int | None = None  # the last correction whose plan kept to the target
        self._overflow: int | None = None  # when the budget was last cut for it
        self._begins = False  # whether the next iteration is the first under new plans
        self._highest, self._peaks = 0, 0  # of the peaks under the present plans that tell of these, and their number
        self._flushes: list[bool] = []  # for the last `SURE` of these iterations, whether the allocator flushed
        self._spills = 0  # periods in a row for which HBM had no room, of those whose memory was laid out
        self._fits = 0  # the same for which it had room
        self._overflow_cuts = 0  # how often the budget was cut for overflow, for the present trace
        self._cuts = 0  # of the budget for flushes, without as many iterations without as make sure

    def __str__(self) -> str:
        """Describe the correction, for a log."""
        return f"budget {'-' if self.correction < 0 else '+'}{format_size(abs(self.correction))}"

    def estimate(self, peak: int) -> None:
        """Take in the peak of a recorded iteration; the first one tells the room for saved tensors."""
        if self._room is None:
            self._room = max(0, self.target - peak)

    def before_correction(self, trace: Trace) -> int:
        """Return the budget of a plan for `trace`: the target if it was measured what else lies in HBM."""
        return self.target - self.free if trace.others else self._room or 0

    def adopted(self) -> None:
        """Take note that the plans changed, and with them what the allocator caches."""
        self._begins = True
        self._highest = self._peaks = self._periods = self._spills = self._fits = 0
        self.rearranged()

    def stayed(self) -> None:
        """Take note that the plans stay after a correction; later iterations will tell whether it was right."""
        self.looked_at = self._highest = self._peaks = self._spills = 0

    def rearranged(self) -> None:
        """Take note that memory is asked for in another order, so the allocator's cache changes as under new plans."""
        self.looked_at = 0
        self.forget_flushes()

    def forget_flushes(self) -> None:
        """Take note that flushes so far tell nothing of what comes."""
        self._flushes.clear()

    def news(self) -> None:
        """Take note of a new trace."""
        self._cuts = self._overflow_cuts = 0
        self._overflow = None

    def peak(self, outcome: IterationOutcome, predicted: int | None, base: int, *, may_grow: bool) -> bool:
        """Take in the peak of an iteration; return whether the correction changed.

        Parameters
        ----------
        outcome : IterationOutcome
            Its peak, and what HBM had no room for.
        predicted : int or None
            Most bytes in HBM; None if that could not be predicted.
        base : int
            The budget before correction.
        may_grow : bool
            Whether the plan would use a larger budget.
        """
        pressed, overflow = outcome.pressed, outcome.overflow
        self.looked_at += 1
        tells, self._begins = predicted is None or not self._begins, False
        if tells:
            self._highest, self._peaks = max(self._highest, outcome.peak), self._peaks + 1
        if self.looked_at > SETTLING:
            self._flushes = [*self._flushes[1 - SURE :], pressed]
        if predicted is not None:
            # The peak tells already what lies in HBM; a flush tells of fragments alone, and of those that stay.
            often = len(self._flushes) == SURE and sum(self._flushes) >= PRESSES
            pressed = pressed and often and self._cuts < CUTS
            if pressed:
                self._cuts += 1
            elif not any(self._flushes) and self.looked_at >= SURE:
                self._cuts = 0
        slack = -int(PRESSED * self.target) if pressed else self.target - outcome.peak if tells else 0
        if outcome.ends_period and self._spills_again(overflow, laid_out=outcome.laid_out):
            self._overflow = overflow
            self._overflow_cuts += 1
            slack = min(slack, -overflow - int(SETTLED * self.target) - 1)
        if tells and slack >= -SETTLED * self.target:
            self._good = self.correction
        if abs(slack) <= SETTLED * self.target:
            return False
        before = self.correction
        if slack < 0:
            # A program may alternate between kinds of iterations: the largest must fit, and it comes again.
            less = self.correction + slack
            if predicted is not None and self._good is not None and less < self._good < self.correction:
                less = self._good  # it grew too far: what was there before kept to the target
            self.correction = self._ceiling = max(-base, less)
        elif may_grow and (gain := slack if predicted is None else min(self.target, predicted) - self._highest) > 0:
            most = self.target - base if predicted is None else self.target // 2
            # What one short iteration leaves free, the next one may need.
            due = self._peaks >= TELLING and self._growths < GROWTHS and not self.sizes_vary
            if predicted is None or (due and gain > WORTH * self.target):
                self._growths += 1
                self.correction = min(self.correction + gain // 2, most if self._ceiling is None else self._ceiling)
        return self.correction != before

    def _spills_again(self, overflow: int, *, laid_out: bool) -> bool:
        """Count a period for which HBM lacked `overflow` bytes; return whether a smaller budget may help."""
        self._periods += 1
        if self._periods > (1 if laid_out else WITHOUT):  # before that what overflows has little to do with the plans
            self._spills, self._fits = (self._spills + 1, 0) if overflow else (0, self._fits + 1)
        if self._fits >= SURE:
            self._overflow = None
        # What did not become less when the budget did is not the plan's; nor is what always comes back.
        may_help = self._overflow is None or overflow < self._overflow
        return self._spills >= SPILLS and may_help and self._overflow_cuts < CUTS
