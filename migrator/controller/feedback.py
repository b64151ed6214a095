"""Corrects the budget, the recorded times and the bandwidths that plans are made with, by measured iterations.

- A peak above the target reduces the budget at once. A peak below the prediction raises it by halves, but never past a
  ceiling: a budget that was found too large. If no peak is predicted, because the rest of HBM was not measured, the
  room for saved tensors grows by half of the gap to the target: one more byte of room raises the peak by one byte at
  most.
- An allocator that flushed its cache had too little room, whatever the peak: fragments are not in it. So had one that
  put something elsewhere, iteration after iteration; that reduces the budget as long as it helps.
- A lane that compute waited for longer than predicted is slower than assumed. Lanes are only corrected downwards.
- The host time of an iteration, without our own work, is an upper bound of the program's own: while it is recorded, the
  host has cold caches and maps new memory. Our own work is counted as it is.
- The time of an iteration without its waits shows by how much recorded times are too long, or a little too short. Too
  long is believed as soon as two iterations agree, as nothing makes an iteration shorter than it is, or if half of
  several are shorter. Too short is believed only if none of several was as short as predicted, as shared hosts change
  their speed by two within seconds. A confirmed pace is not corrected while others use the memory bus or the cores.

Each correction is made a few times only, so planning ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from itertools import pairwise

from torch_tiers.allocator.sizes import format_size
from torch_tiers.migrator.controller.cached_plans import Corrections
from torch_tiers.migrator.controller.planned import PlannedIteration
from torch_tiers.migrator.model.links import Calls, Links
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.timing import HookTime, HostTime, IterationTime, at_pace, with_host
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.simulator import Simulated

PRESSED = 0.03  # of the target: by so much the budget is cut when the allocator flushed its cache
SETTLED = 0.02  # of the target: closer than this the budget stays as it is
LATE = 0.004  # of the ideal step: stalls that were not predicted and are shorter do not count,
LEAST_LATE = 500e-6  # nor those shorter than so many seconds: each wait has a few microseconds of its own
SETTLING = 3  # iterations under new plans in which the allocator may flush: what it caches fits the plans before
TELLING = 2  # iterations under new plans that tell what is left free: where lengths alternate, one may be short
CUTS = 3  # of the budget for flushes, one after the other, after which these are not the plan's
SPILLS = 3  # the same of memory put elsewhere: what an older layout left there may take a few iterations to come back
AGREEING = 2  # iterations one after the other that must agree, or something disturbed one of them
UNTIMED = 16  # iterations under new plans, after which iteration times that did not come are not waited for
HOSTS = 4  # iterations of which the one that took the host the least tells what it needs
PRESSES = 4  # of the last SURE iterations with a flush: there is too little room, and by then the pace is known
SURE = 8  # iterations of which none may have been as short as predicted, before that is taken to be too short
LOOKS = 2  # times that the program's times or its links are corrected: it is to settle, and each costs a plan
FASTEST = 0.3  # of the recorded times: on a slow host a recording is three times too long, and not more
SLOWEST = 1.2  # and not earlier than that: what takes longer has another cause
OFF_PACE = 0.03  # of an iteration: closer than this, times are as predicted
LATE_PACE = 0.06  # and this, where the iteration took longer: new plans are to be worth it
GROWTHS = 2  # times that the budget of a plan whose peak was predicted grows: each costs a plan, and steps to settle
WORTH = 0.08  # of the target: what a growth must bring


class Feedback:
    """The corrections to what the policy receives.

    Parameters
    ----------
    target : int
        The peak to aim for, in bytes.
    given : Links
        The assumed bandwidths before any correction.
    """

    def __init__(self, target: int, given: Links) -> None:
        self.given = given
        self.correction = 0  # of the budget, in bytes
        self.pace = 1.0  # what the program's own times on the device are multiplied by
        self.host_pace = 1.0  # and those of the host
        self.hooks = 0.0  # seconds that hooks of ours keep the host in an iteration, under any plan
        self.calls = given.calls  # what a plan costs it besides
        self.joins = False  # whether the host waits for the device between two iterations
        self._hosts: list[HostTime] = []  # of the iterations under the plans there are, once these have settled
        self._host_looks = 0  # times that these were looked at
        self._issuing = 0.0  # seconds of the host's for the program, as they were recorded
        self._borne_out = False  # whether as many times as correct that came while nobody else needed the memory bus
        self._times: list[IterationTime] = []  # iterations under the plans there are, once these have settled
        self._disturbed: list[bool] = []  # whether the allocator made each of these longer
        self._took: list[float] = []  # seconds of the last iterations under the plans there are
        self._target = target
        self._ceiling: int | None = None  # the largest correction that no iteration so far has found too large
        self._parts: dict[str, float] = {}  # of what is given, by lane: what was found to be left of it
        self._parts_alone: dict[str, float] = {}  # and of that, what was found while nobody else needed the memory bus
        self._looks = 0  # times that pace or links changed
        self._growths = 0
        self._good: int | None = None  # the last correction whose plan kept to the target
        self._overflow: int | None = None  # when the budget was last cut for it
        self._under = 0  # iterations under the plans there are
        self._highest = 0  # of their peaks
        self._flushes: list[bool] = []  # of these the last ones, whether the allocator flushed its cache in it
        self._spills = 0  # the same of those in which something was put elsewhere
        self._cuts = 0  # of the budget for flushes, without as many iterations without as make sure

    def __str__(self) -> str:
        """Describe the corrections, for a log."""
        lanes = "".join(f", {lane} gives {part:.0%} of its bandwidth" for lane, part in self._parts.items())
        sign = "-" if self.correction < 0 else "+"
        host = ""
        if self._host_looks:
            names = {"group": "group", "moved": "moved tensor", "remade": "recomputed tensor"}
            each = ", ".join(f"{getattr(self.calls, key) * 1e6:.0f} us per {name}" for key, name in names.items())
            host = f"; host time x {self.host_pace:.2f}, our hooks {self.hooks * 1e3:.1f} ms an iteration and {each}"
        return f"budget {sign}{format_size(abs(self.correction))}, recorded times x {self.pace:.2f}{host}{lanes}"

    @property
    def settled(self) -> bool:
        """Return whether the present plans were confirmed: enough iteration times came to correct them, and none did.

        Without such times (no GPU, several kinds of iterations, several threads) a number of iterations suffices.
        """
        return len(self._times) == SURE or self._under >= UNTIMED

    def note(self, time: IterationTime) -> None:
        """Take note of the time of an iteration under the present plans, which need not correct anything."""
        self._took = [*self._took[1 - SURE :], time.seconds]

    @property
    def took(self) -> float | None:
        """Return the median time of the last iterations under the present plans, in seconds; None of too few."""
        return sorted(self._took)[len(self._took) // 2] if len(self._took) >= HOSTS else None

    @property
    def links(self) -> Links:
        """Return the bandwidths and the host costs of plans, corrected."""
        return self.given.scaled(self._parts).with_calls(self.calls)

    def corrected(self, trace: Trace) -> Trace:
        """Return a trace with corrected times."""
        return with_host(at_pace(trace, self.pace), self.host_pace, self.hooks, joins=self.joins)

    @property
    def corrections(self) -> Corrections:
        """Return the corrections so far, for the next run of the program."""
        pace = (self.pace, self.host_pace, self.hooks, self._issuing)
        return Corrections(self.correction, *pace, self.joins, self.calls, dict(self._parts))

    def resume(self, found: Corrections) -> None:
        """Begin with the corrections of an earlier run; iteration and host times may correct them once more."""
        self.correction, self.pace, self.host_pace = found.budget, found.pace, found.host_pace
        self.hooks, self._issuing, self.joins, self.calls = found.hooks, found.issuing, found.joins, found.calls
        self._parts = self._parts_alone = found.parts
        self._looks = self._host_looks = LOOKS

    def under(self, given: Links) -> Feedback:
        """Return the same corrections for other links; what is measured under those does not correct these."""
        other = copy(self)
        other.given = given
        # Of what iterations took beside others nothing is borne out without them, nor the other way round.
        same = given.contended == self.given.contended
        other._times, other._disturbed = (list(self._times), list(self._disturbed)) if same else ([], [])
        other._hosts, other._took, other._flushes = [], [], []
        if not given.contended:
            other._parts = self._parts_alone
        return other

    def adopted(self) -> None:
        """Take note that the plans changed, and with them what the allocator caches."""
        self._under = self._spills = self._highest = 0
        self._flushes.clear()
        self._took.clear()
        self._times.clear()
        self._disturbed.clear()
        self._hosts.clear()

    def stayed(self) -> None:
        """Take note that the plans stay after a correction; later iterations will tell whether it was right."""
        self._under = self._highest = 0

    def rearranged(self) -> None:
        """Take note that memory is asked for in another order, so the allocator's cache changes as under new plans."""
        self._under = self._spills = 0
        self._flushes.clear()

    def news(self) -> None:
        """Take note of a new trace: the corrections of times belong to the one before."""
        self.pace, self._borne_out = 1.0, False
        self.host_pace, self.hooks, self.joins, self._host_looks = 1.0, 0.0, False, 0
        self._times.clear()
        self._disturbed.clear()
        self._looks = self._cuts = 0

    def iteration_over(
        self,
        planned: Sequence[PlannedIteration],
        base: int,
        peak: int,
        *,
        pressed: bool,
        overflow: int,
        iteration_time: IterationTime | None,
        host: HostTime | None = None,
        resized: bool = False,
    ) -> bool:
        """Take in an iteration under the present plans; return whether any correction changed.

        Parameters
        ----------
        planned : sequence of PlannedIteration
            One for each kind of iteration.
        base, peak, pressed, overflow
            See `peak`.
        iteration_time : IterationTime, optional
            See `iteration`.
        host : HostTime, optional
            See `host`.
        resized : bool
            Whether the iteration was larger or smaller than planned.
        """
        if (overflow or pressed or peak > self._target) and _hold_least(planned):
            self._under += 1
            return False
        predictions = [each.predicted for each in planned if each.predicted is not None]
        # Of several kinds of iterations nobody says which one this was: what a short one left free, a long one needs.
        one_kind_or_unpredicted = len(planned) == 1 or not predictions
        changed = self.peak(
            peak,
            max((predicted.peak["hbm"] for predicted in predictions), default=None),
            base,
            pressed=pressed,
            may_grow=one_kind_or_unpredicted and not all(each.plan.keeps_everything for each in planned),
            overflow=overflow,
        )
        if (
            iteration_time is not None and len(planned) == len(predictions) == 1
        ):  # else it says nothing of the pace, either
            (only,), (predicted,) = planned, predictions
            believed = host is None or not self._awaits_host(predicted)
            changed |= host is not None and self.host(host, only.plan, predicted)
            changed |= self.iteration(
                iteration_time, predicted, believed=believed, disturbed=pressed or overflow > 0 or resized
            )
        return changed

    def _awaits_host(self, predicted: Simulated) -> bool:
        """Return whether the program's host time is still to be measured; a recording overstates it."""
        due = self._host_looks <= LOOKS and len(self._hosts) < HOSTS
        return due and bool(predicted.issuing) and not self.given.contended

    def host(self, host: HostTime, plan: Plan, predicted: Simulated) -> bool:
        """Take in the host time of an iteration under a plan; return whether the assumed host time changed.

        The least of a few iterations counts, and of those under earlier plans: an iteration is longer if the host
        waited for the device, or for others. This is done once for each plan.
        """
        if self._under < SETTLING or not self._awaits_host(predicted):
            return False
        self._hosts.append(host)
        if len(self._hosts) < HOSTS:
            return False
        self._host_looks += 1
        if self._host_looks == 1:  # of what was recorded: from here on predictions are of what was corrected
            self._issuing = predicted.issuing
        foreseen = self._host_seconds(predicted)
        best = min(self._hosts, key=lambda host: host.seconds - host.ours)
        self.host_pace = min(self.host_pace, max(0.0, best.seconds - best.ours) / self._issuing)
        self.calls = _measured(best.hooks, plan, predicted.operators, self.calls)
        by_plan = best.hooks.groups + best.hooks.moves + max(best.hooks.remade, predicted.operators)
        self.hooks = max(0.0, best.ours - by_plan)
        self.joins = all(host.idle for host in self._hosts)
        now = self.host_pace * self._issuing + self.hooks + by_plan
        return abs(now - foreseen) > OFF_PACE * predicted.seconds

    def _host_seconds(self, predicted: Simulated) -> float:
        """Return the predicted host time of an iteration."""
        return predicted.issuing + predicted.calls + self.hooks

    def peak(
        self, peak: int, predicted: int | None, base: int, *, pressed: bool, may_grow: bool, overflow: int = 0
    ) -> bool:
        """Take in the peak of an iteration; return whether the correction changed.

        Parameters
        ----------
        peak, predicted : int
            Most bytes in HBM; None if that could not be predicted.
        base : int
            The budget before correction.
        pressed : bool
            Whether the allocator had to flush its cache to stay within the budget.
        may_grow : bool
            Whether the plan would use a larger budget.
        overflow : int
            Bytes that the allocator had to put elsewhere, as HBM was full.
        """
        self._under += 1
        self._highest = max(self._highest, peak)
        if self._under > SETTLING:
            self._flushes = [*self._flushes[1 - SURE :], pressed]
        if predicted is not None:
            # The peak tells already what lies in HBM; a flush tells of fragments alone, and of those that stay.
            often = len(self._flushes) == SURE and sum(self._flushes) >= PRESSES
            pressed = pressed and often and self._cuts < CUTS
            if pressed:
                self._cuts += 1
            elif not any(self._flushes) and self._under >= SURE:
                self._cuts = 0
        slack = -int(PRESSED * self._target) if pressed else self._target - peak
        self._spills = self._spills + 1 if overflow and self._under > SETTLING else 0
        if not overflow:
            self._overflow = None
        elif self._spills >= SPILLS and (self._overflow is None or overflow < self._overflow):
            # What did not become less when the budget did is not the plan's.
            self._overflow = overflow
            slack = min(slack, -overflow - int(SETTLED * self._target) - 1)
        if slack >= -SETTLED * self._target:
            self._good = self.correction
        if abs(slack) <= SETTLED * self._target:
            return False
        before = self.correction
        if slack < 0:
            # A program may alternate between kinds of iterations: the largest must fit, and it comes again.
            less = self.correction + slack
            if predicted is not None and self._good is not None and less < self._good < self.correction:
                less = self._good  # it grew too far: what was there before kept to the target
            self.correction = self._ceiling = max(-base, less)
        elif may_grow and (gain := slack if predicted is None else min(self._target, predicted) - self._highest) > 0:
            most = self._target - base if predicted is None else self._target // 2
            # What one short iteration leaves free, the next one may need.
            due = self._under >= TELLING and self._growths < GROWTHS
            if predicted is None or (due and gain > WORTH * self._target):
                self._growths += 1
                self.correction = min(self.correction + gain // 2, most if self._ceiling is None else self._ceiling)
        return self.correction != before

    def iteration(
        self, time: IterationTime, predicted: Simulated, *, believed: bool = True, disturbed: bool = False
    ) -> bool:
        """Take in the time of an iteration; return whether the pace or the links changed.

        They change only if the time is `believed`. It is not while the host's time is to be corrected: an iteration
        that is short because the host is faster than recorded would pass for a faster device.

        Compute time without its waits is the program's own. Under a plan the host stays ahead of the device, while it
        is late now and then in recorded iterations, and always in a program of small kernels. It is never early there,
        so an iteration shorter than predicted is believed as soon as two agree; on a host so uneven that no two do, the
        median of eight is. But while an iteration is recorded the device waits for lanes half of the time. At its power
        limit it is up to a tenth slower without these waits, in every iteration. The host, too, may make some of them
        longer. So longer times are believed only if of eight not one was shorter. Even longer times have another cause.

        To flush takes time, and memory in DRAM is slow, whatever the plan. That makes no iteration shorter; and one of
        another size takes another time. Such `disturbed` ones tell that recorded times are too long, by the median of
        eight, and nothing else.

        While others use the memory bus or the cores, times show their load. A pace that was confirmed before stays:
        otherwise plans would be made anew whenever a load comes, which takes seconds on busy cores.
        """
        if self._under < SETTLING:
            return False
        self._times = [*self._times[1 - SURE :], time]
        self._disturbed = [*self._disturbed[1 - SURE :], disturbed]
        changed = believed and self._look(predicted)
        if not changed and not self.given.contended and len(self._times) == SURE:
            self._borne_out = True
        return changed

    def _look(self, predicted: Simulated) -> bool:
        """Correct the pace or the links by the times so far; return whether that was done."""
        # Once more the pace alone, by more iterations: better plans do not wait, and so the looks before were at the
        # first iterations under theirs. On a slow host those are long, and what two of them agree on is still too long.
        last, disturbed = self._looks == LOOKS, any(self._disturbed)
        if self._looks > LOOKS or len(self._times) < (SURE if last or disturbed else AGREEING):
            return False
        if self.given.contended and self._borne_out:
            agreed = None if disturbed else _agreed(self._times[-AGREEING:])
            return agreed is not None and not last and self.stalls(agreed.stalls, predicted)
        self._looks += last  # whatever it finds: two short iterations at the end of an epoch are no news of the pace
        agreed = None if disturbed else _agreed(self._times if last else self._times[-AGREEING:])
        best = agreed or _median(self._times)
        if best is None or (computed := _computed(best)) <= 0:
            return False
        foreseen = _without_stalls(predicted)
        late = foreseen * (1 + LATE_PACE)
        if not last and late < computed < foreseen * SLOWEST:
            computed = min(map(_computed, self._times))
            believed = len(self._times) == SURE and computed > late and not disturbed
        else:
            believed = computed < foreseen * (1 - OFF_PACE)
        if self._host_seconds(predicted) > foreseen * (1 - OFF_PACE):
            believed = False  # the device waits for the host, and tells nothing of itself
        if not believed:
            return agreed is not None and not last and self.stalls(agreed.stalls, predicted)
        self._looks += 1
        self.pace, self._borne_out = max(FASTEST, self.pace * computed / foreseen), False
        return True

    def stalls(self, measured: Mapping[str, float], predicted: Simulated) -> bool:
        """Take in how long compute waited for each lane, in seconds; return whether the links changed."""
        slower = {}
        for lane, seconds in measured.items():
            late = seconds - predicted.stalls.get(lane, 0.0)
            busy = predicted.busy.get(lane, 0.0)
            if busy and late > max(LATE * predicted.ideal, LEAST_LATE):
                slower[lane] = self._parts.get(lane, 1.0) * busy / (busy + late)
        if not slower:
            return False
        self._looks += 1
        self._parts = {**self._parts, **slower}
        if not self.given.contended:
            self._parts_alone = self._parts
        return True


def _measured(hooks: HookTime, plan: Plan, operators: float, before: Calls) -> Calls:
    """Return the host costs of a plan's parts, by what hooks took under it; as `before` for parts that it lacks."""
    moved = sum(len(group.sites) for group in plan.groups)
    return Calls(
        group=hooks.groups / len(plan.groups) if plan.groups else before.group,
        moved=hooks.moves / moved if moved else before.moved,
        remade=max(0.0, hooks.remade - operators) / len(plan.recompute) if plan.recompute else before.remade,
    )


def _hold_least(planned: Sequence[PlannedIteration]) -> bool:
    """Return whether no plans hold less; of several, the one that is predicted to hold most counts."""
    if all(each.predicted is not None for each in planned):
        return max(planned, key=PlannedIteration.peak).least
    return all(each.least for each in planned)


def _seconds(time: IterationTime) -> float:
    return time.seconds


def _agreed(times: Sequence[IterationTime]) -> IterationTime | None:
    """Return the shortest of the times that agree with their neighbour; None if no two do.

    An iteration that is shorter than those beside it is another: fewer samples, or a skipped step.
    """
    pairs = (sorted(pair, key=_seconds) for pair in pairwise(times))
    agreed = (best for best, other in pairs if other.seconds <= best.seconds * (1 + OFF_PACE))
    return min(agreed, key=_seconds, default=None)


def _median(times: Sequence[IterationTime]) -> IterationTime | None:
    """Return the median once there are enough times: half of them were no longer."""
    return sorted(times, key=_computed)[SURE // 2] if len(times) == SURE else None


def _without_stalls(predicted: Simulated) -> float:
    """Return the predicted time of the iteration without its waits."""
    return predicted.seconds - sum(predicted.stalls.values())


def _computed(time: IterationTime) -> float:
    """Return the time of the iteration without its waits."""
    return time.seconds - sum(time.stalls.values())
