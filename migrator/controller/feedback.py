"""Corrects recorded times and assumed bandwidths by measured iterations, and by `Budget` the budget. Pure.

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
from dataclasses import replace
from itertools import pairwise

from torch_tiers.migrator.controller.budget import SETTLING, SURE, Budget
from torch_tiers.migrator.controller.corrections import Corrections
from torch_tiers.migrator.controller.outcome import IterationOutcome
from torch_tiers.migrator.controller.planned import PlannedIteration, PlanRequest, hold_least
from torch_tiers.migrator.model.links import Calls, Links
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.timing import HookTime, HostTime, IterationTime, alike, at_pace, with_host
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.simulator import Simulated

LATE = 0.004  # of the ideal step: stalls that were not predicted and are shorter do not count,
LEAST_LATE = 500e-6  # nor those shorter than so many seconds: each wait has a few microseconds of its own
AGREEING = 2  # iterations one after the other that must agree, or something disturbed one of them
HOSTS = 4  # iterations of which the one that took the host the least tells what it needs
UNTIMED = 16  # iterations under new plans, after which iteration times that did not come are not waited for
LOOKS = 2  # times that the program's times or its links are corrected: it is to settle, and each costs a plan
FASTEST = 0.3  # of the recorded times: on a slow host a recording is three times too long, and not more
SLOWEST = 1.2  # and not earlier than that: what takes longer has another cause
OFF_PACE = 0.03  # of an iteration: closer than this, times are as predicted
LATE_PACE = 0.06  # and this, where the iteration took longer: new plans are to be worth it


class Feedback:
    """The corrections to what the policy receives.

    Parameters
    ----------
    target : int
        The peak to aim for, in bytes.
    given : Links
        The assumed bandwidths and host costs before any correction.
    """

    def __init__(self, target: int, given: Links) -> None:
        self.given = given
        self.budget = Budget(target)
        self._now = Corrections(calls=given.calls)  # but for that of the budget
        self._parts_alone = self._now.parts  # of the bandwidths, while nobody else needed the memory bus
        self._looks = 0  # times that the device's pace or the bandwidths changed
        self._host_looks = 0  # times that host times were looked at
        self._borne_out = False  # whether as many times as correct that came while nobody else needed the memory bus
        self._times: list[IterationTime] = []  # iterations under the plans there are, once these have settled
        self._disturbed: list[bool] = []  # whether the allocator made each of these longer
        self._hosts: list[HostTime] = []  # what these took the host
        self._took: list[float] = []  # seconds of the last iterations under the plans there are

    def __str__(self) -> str:
        """Describe the corrections, for a log."""
        now, host = self._now, ""
        lanes = "".join(f", {lane} gives {part:.0%} of its bandwidth" for lane, part in now.parts.items())
        if self._host_looks:
            names = {"group": "group", "moved": "moved tensor", "remade": "recomputed tensor"}
            each = ", ".join(f"{getattr(now.calls, key) * 1e6:.0f} us per {name}" for key, name in names.items())
            host = f"; host time x {now.host_pace:.2f}, our hooks {now.hooks * 1e3:.1f} ms an iteration and {each}"
        return f"{self.budget}, recorded times x {now.pace:.2f}{host}{lanes}"

    @property
    def settled(self) -> bool:
        """Return whether the present plans were confirmed: enough iteration times came to correct them, and none did.

        Without such times (no GPU, several kinds of iterations, several threads) a number of iterations suffices.
        """
        return len(self._times) == SURE or self.budget.looked_at >= UNTIMED

    @property
    def took(self) -> float | None:
        """Return the median time of the last iterations under the present plans, in seconds; None of too few."""
        return sorted(self._took)[len(self._took) // 2] if len(self._took) >= HOSTS else None

    @property
    def links(self) -> Links:
        """Return the bandwidths and the host costs of plans, corrected."""
        return self.given.scaled(self._now.parts).with_calls(self._now.calls)

    def corrected(self, trace: Trace) -> Trace:
        """Return a trace with corrected times."""
        now = self._now
        return with_host(at_pace(trace, now.pace), now.host_pace, now.hooks, joins=now.joins)

    def request(self, recorded: Sequence[Trace], present: tuple[PlannedIteration, ...] = ()) -> PlanRequest:
        """Return what is to be asked for: plans for these traces, or the `present` ones if they are as good."""
        traces = tuple(self.corrected(alike(trace)) for trace in recorded)
        budgets = tuple(map(self.budget.before_correction, traces))
        return PlanRequest(traces, budgets, self.budget.correction, self.links, present)

    def note(self, time: IterationTime) -> None:
        """Take note of the time of an iteration under the present plans, which need not correct anything."""
        self._took = [*self._took[1 - SURE :], time.seconds]

    @property
    def corrections(self) -> Corrections:
        """Return the corrections so far, for the next run of the program."""
        return replace(self._now, budget=self.budget.correction)

    def resume(self, found: Corrections) -> None:
        """Begin with the corrections of an earlier run; iteration and host times may correct them once more."""
        self._now, self._parts_alone, self.budget.correction = found, found.parts, found.budget
        self._looks = self._host_looks = LOOKS

    def relink(self, given: Links) -> None:
        """Correct other links from now on."""
        # Of what iterations took beside others nothing is borne out without them, nor the other way round.
        if given.contended != self.given.contended:
            self._forget_times()
        self.given = given
        self.budget.forget_flushes()
        self._hosts.clear()
        self._took.clear()
        if not given.contended:
            self._now = replace(self._now, parts=self._parts_alone)

    def adopted(self) -> None:
        """Take note that the plans changed."""
        self.budget.adopted()
        self._forget_times()
        self._hosts.clear()
        self._took.clear()

    def news(self) -> None:
        """Take note of a new trace: the corrections of times belong to the one before."""
        self.budget.news()
        self._now = replace(self._now, pace=1.0, host_pace=1.0, hooks=0.0, joins=False)
        self._looks, self._host_looks, self._borne_out = 0, 0, False
        self._forget_times()

    def _forget_times(self) -> None:
        self._times.clear()
        self._disturbed.clear()

    def iteration_over(self, planned: Sequence[PlannedIteration], base: int, outcome: IterationOutcome) -> bool:
        """Take in an iteration under the present plans, for a budget of `base` before correction.

        Return whether any correction changed.
        """
        if (outcome.overflow or outcome.pressed or outcome.peak > self.budget.target) and hold_least(planned):
            self.budget.looked_at += 1
            return False
        predictions = [each.predicted for each in planned if each.predicted is not None]
        # Of several kinds of iterations nobody says which one this was: what a short one left free, a long one needs.
        one_kind_or_unpredicted = len(planned) == 1 or not predictions
        changed = self.budget.peak(
            outcome,
            max((predicted.peak["hbm"] for predicted in predictions), default=None),
            base,
            may_grow=one_kind_or_unpredicted and not all(each.plan.keeps_everything for each in planned),
        )
        time, host = outcome.iteration_time, outcome.host
        if time is None or self.budget.looked_at < SETTLING or not len(planned) == len(predictions) == 1:
            return changed  # of several kinds, it says nothing of the pace, either
        (only,), (predicted,) = planned, predictions
        believed = host is None or not self._awaits_host(predicted)
        changed |= host is not None and self.host(host, only.plan, predicted)
        disturbed = outcome.pressed or outcome.overflow > 0 or outcome.resized
        return self.iteration(time, predicted, believed=believed, disturbed=disturbed) or changed

    def _awaits_host(self, predicted: Simulated) -> bool:
        """Return whether the program's host time is still to be measured; a recording overstates it."""
        due = self._host_looks <= LOOKS and len(self._hosts) < HOSTS
        return due and bool(predicted.issuing) and not self.given.contended

    def host(self, host: HostTime, plan: Plan, predicted: Simulated) -> bool:
        """Take in the host time of an iteration under a plan; return whether the assumed host time changed.

        The least of a few iterations counts, and of those under earlier plans: an iteration is longer if the host
        waited for the device, or for others. This is done once for each plan.
        """
        if not self._awaits_host(predicted):
            return False
        self._hosts.append(host)
        if len(self._hosts) < HOSTS:
            return False
        self._host_looks += 1
        before = self._now
        # Of what was recorded: after the first look predictions are of what was corrected. Cached corrections may be of
        # a run that never looked.
        issuing = predicted.issuing if self._host_looks == 1 or not before.issuing else before.issuing
        best = min(self._hosts, key=lambda host: host.seconds - host.ours)
        by_plan = best.hooks.groups + best.hooks.moves + max(best.hooks.remade, predicted.operators)
        self._now = now = replace(
            before,
            host_pace=min(before.host_pace, max(0.0, best.seconds - best.ours) / issuing),
            hooks=max(0.0, best.ours - by_plan),
            issuing=issuing,
            joins=all(host.idle for host in self._hosts),
            calls=_measured(best.hooks, plan, predicted.operators, before.calls),
        )
        foreseen = predicted.issuing + predicted.calls + before.hooks
        return abs(now.host_pace * issuing + now.hooks + by_plan - foreseen) > OFF_PACE * predicted.seconds

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
        foreseen, now = predicted.seconds - sum(predicted.stalls.values()), self._now
        late = foreseen * (1 + LATE_PACE)
        if not last and late < computed < foreseen * SLOWEST:
            computed = min(map(_computed, self._times))
            believed = len(self._times) == SURE and computed > late and not disturbed
        else:
            believed = computed < foreseen * (1 - OFF_PACE)
        if predicted.issuing + predicted.calls + now.hooks > foreseen * (1 - OFF_PACE):
            believed = False  # the device waits for the host, and tells nothing of itself
        if not believed:
            return agreed is not None and not last and self.stalls(agreed.stalls, predicted)
        self._looks += 1
        self._now = replace(now, pace=max(FASTEST, now.pace * computed / foreseen))
        self._borne_out = False
        return True

    def stalls(self, measured: Mapping[str, float], predicted: Simulated) -> bool:
        """Take in how long compute waited for each lane, in seconds; return whether the links changed."""
        slower, parts = {}, self._now.parts
        for lane, seconds in measured.items():
            late = seconds - predicted.stalls.get(lane, 0.0)
            busy = predicted.busy.get(lane, 0.0)
            if busy and late > max(LATE * predicted.ideal, LEAST_LATE):
                slower[lane] = parts.get(lane, 1.0) * busy / (busy + late)
        if not slower:
            return False
        self._looks += 1
        self._now = replace(self._now, parts={**parts, **slower})
        if not self.given.contended:
            self._parts_alone = self._now.parts
        return True


def _measured(hooks: HookTime, plan: Plan, operators: float, before: Calls) -> Calls:
    """Return the host costs of a plan's parts, by what hooks took under it; as `before` for parts that it lacks."""
    moved = sum(len(group.sites) for group in plan.groups)
    return Calls(
        group=hooks.groups / len(plan.groups) if plan.groups else before.group,
        moved=hooks.moves / moved if moved else before.moved,
        remade=max(0.0, hooks.remade - operators) / len(plan.recompute) if plan.recompute else before.remade,
    )


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


def _computed(time: IterationTime) -> float:
    """Return the time of the iteration without its waits."""
    return time.seconds - sum(time.stalls.values())
