"""The simulator: trace + links + plan -> step time, peak per tier, lane occupancy, stalls by cause.

It does what the engine does, in the order of the compute stream. A group leaves when its last site was saved; the
copies of a lane run one after the other. HBM is released at a save, when the limit asks for it; compute then
waits for the copy, and what the program itself holds lies there for as long as it does. Compute also waits once a
group was used for the last time whose copy is still under way: the lane reads memory that is free by then. From
the first use on, groups come back in the order of needs, as soon as their in-trigger and the limit allow, behind
whatever the stream was given before. What is needed while it is away stalls compute. What is recomputed takes its
time at the position at which it is needed. Two clocks run, `migrator.model.clocks`: moves and recomputations cost the
host calls, which cost the step where it waits for the host. Pure functions on plain data.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

import numpy as np

from torch_tiers.allocator.sizes import PAGE, round_up
from torch_tiers.migrator.model.clocks import Clocks
from torch_tiers.migrator.model.links import STAGED, Links
from torch_tiers.migrator.model.plan import READ_AHEAD, PageGroup, Plan
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.planner.effects import Effect, Work, effect
from torch_tiers.migrator.planner.intervals import Bytes, durations
from torch_tiers.migrator.planner.schedule import limits_by_position, spans_of
from torch_tiers.migrator.simulator.group import Group, past_dram
from torch_tiers.migrator.simulator.machine import Machine

SURE = 1.05  # times the device's seconds


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a step under a plan comes to.

    Attributes
    ----------
    seconds : float
        The step.
    ideal : float
        The step with everything kept.
    device_seconds : float or None
        Seconds of it that the device computes; None without a host clock.
    recomputing : float
        Seconds of the step spent on recomputing what was dropped.
    slowed : float
        Seconds by which compute was slower beside busy lanes.
    issuing : float
        Seconds for which the host issues the program's own operators, from the first save on; 0 without a host clock.
    calls : float
        Seconds of the host's for what this plan moves and recomputes.
    operators : float
        Of these, those for the operators that are run again.
    stalls : mapping of str to float
        Seconds for which compute waited, by the lane it waited for.
    busy : mapping of str to float
        Seconds for which each lane was busy.
    peak : mapping of str to int
        Most bytes in each tier.
    hbm : array of int
        Most bytes in HBM, by stretch.
    lingering : array of int
        Bytes of it, by stretch, of groups that have left, which the program itself still holds.
    clock : array of float
        Seconds from the iteration's begin to each position, in this step.
    moves : tuple of (float, float, float, float)
        For each group of the plan when it begins and ends to leave and to come back; a pair that did not happen
        is zero long.
    """

    seconds: float
    ideal: float
    device_seconds: float | None
    recomputing: float
    slowed: float
    issuing: float
    calls: float
    operators: float
    stalls: Mapping[str, float]
    busy: Mapping[str, float]
    peak: Mapping[str, int]
    hbm: Bytes
    lingering: Bytes
    clock: np.ndarray
    moves: tuple[tuple[float, float, float, float], ...]

    @property
    def fraction(self) -> float:
        """Of ideal; 1 where times were not measured."""
        return self.ideal / self.seconds if self.seconds else 1.0

    @property
    def is_sure_of_ideal(self) -> bool:
        """Whether the step with everything kept is at most 5% longer than the device computes.

        Else it waits for the host, whose recorded times are too long.
        """
        return not self.device_seconds or self.ideal <= SURE * self.device_seconds


def simulate(
    trace: Trace, links: Links, plan: Plan, *, outcome: Effect | None = None, machine: Machine | None = None
) -> Simulated:
    """Play one step of `trace` under `plan`.

    Parameters
    ----------
    trace : Trace
        The iteration. Without times everything takes none, and only memory is told.
    links : Links
        How fast the lanes are, and what moving costs besides.
    plan : Plan
        What is kept, moved and recomputed.
    outcome : Effect, optional
        What the plan's choice brings about, where it is known already.
    machine : Machine, optional
        The machine that it runs on, where somebody wants to see what that does when.
    """
    if outcome is None:
        outcome = effect(trace, {trace.by_key[key].storage for key in plan.recompute})
    return _Step(trace, links, plan, outcome, machine or Machine(links, trace.lead)).run()


@dataclass(slots=True)
class _Events:
    """What happens at one position, besides time passing."""

    enter: int = 0
    leave: int = 0
    complete: list[Group] = field(default_factory=list)
    need: list[Group] = field(default_factory=list)
    done: list[Group] = field(default_factory=list)


class _Step:
    def __init__(self, trace: Trace, links: Links, plan: Plan, outcome: Effect, machine: Machine) -> None:
        self.trace, self.links, self.plan, self.outcome = trace, links, plan, outcome
        self.clocks = trace.clocks or Clocks(durations(trace).tolist(), [0.0] * (trace.positions + 1))
        self.hooks = self._hooks()  # seconds for which they keep the host in each stretch
        self.machine = machine
        self.held = {held.holders[0].key: held for held in outcome.held.values()}
        self.resident = 0
        self.recomputing = 0.0
        self.leaving: deque[Group] = deque()
        self.order: deque[Group] = deque()
        self.lingering = np.zeros(trace.positions + 2, dtype=np.int64)  # changes of what left, but for the program
        spans = spans_of(plan, outcome)
        past = past_dram(plan.groups, links.dram) if links.disk_write else frozenset[int]()
        self.groups = [
            Group(group, span, *(STAGED if number in past else links.ways(group.tier)), self._lasting(group))
            for number, (group, span) in enumerate(zip(plan.groups, spans, strict=True))
        ]

    def run(self) -> Simulated:
        trace = self.trace
        events, first_use = self._events(), self._first_use()
        limits = limits_by_position(self.plan, self.trace, self.outcome)
        limit = self.plan.room
        work = self.outcome.work
        resident = [0] * (trace.positions + 1)
        clock = [0.0] * trace.positions
        ended: Sequence[Group] = ()  # groups that the position before this one used for the last time
        for position in range(trace.positions):
            self._stretch(position)
            self._outlast(ended)
            limit = limits.get(position, limit)
            event = events.get(position)
            if position == first_use:
                needed = (group for group in self.groups if group.span.need is not None)
                self.order = deque(sorted(needed, key=lambda group: group.span.need or 0))
                self._prefetch(limit, position)
            if event is not None:
                for group in event.need:
                    self._fetch(group)
            if position in work:
                self._again(work[position])
            left, ended = 0, ()
            if event is not None:
                ended = event.done
                self.resident += event.enter
                for group in event.complete:
                    self._offload(group)
                left = event.leave + sum(group.planned.nbytes for group in event.done)
                self.resident -= left
            if position < first_use or (event is not None and event.enter):
                self._relieve(limit, position)
            elif self.order:
                self._prefetch(limit, position)
            resident[position + 1] = self.resident + left
            clock[position] = self.machine.now
        self._stretch(trace.positions)
        self._outlast(ended)
        return self._result(np.array(resident, dtype=np.int64), np.array(clock))

    # ---------------------------------------------------------------------------------- what happens when

    def _events(self) -> dict[int, _Events]:
        events: dict[int, _Events] = {}
        group_of = {key: group for group in self.groups for key in group.planned.sites}
        for held in self.outcome.held.values():
            if not held.nbytes:
                continue
            events.setdefault(held.birth, _Events()).enter += held.nbytes
            if held.holders[0].key not in group_of and any(holder.uses for holder in held.holders):
                events.setdefault(held.leave, _Events()).leave += held.nbytes
        for group in self.groups:
            events.setdefault(group.span.complete, _Events()).complete.append(group)
            if group.span.need is not None:
                events.setdefault(group.span.need, _Events()).need.append(group)
                events.setdefault(group.span.leave, _Events()).done.append(group)
        return events

    def _lasting(self, group: PageGroup) -> list[tuple[int, int]]:
        members = (self.held[key] for key in group.sites if key in self.held)
        return [(self.trace.held[each.ident], each.nbytes) for each in members if each.ident in self.trace.held]

    def _hooks(self) -> list[float]:
        """Of what comes of a plan, half of the host's time where a tensor is saved, and half where it is first used."""
        trace, calls = self.trace, self.links.calls
        taken = [self.clocks.hooks] * (trace.positions + 1)
        moved = ((key, calls.moved) for group in self.plan.groups for key in group.sites)
        remade = ((key, calls.remade) for key in self.outcome.recomputed)
        self.calls = 0.0
        for key, seconds in chain(moved, remade):
            site = trace.by_key[key]
            self.calls += seconds
            taken[site.birth] += seconds / 2
            taken[site.uses[0] if site.uses else site.birth] += seconds / 2
        made = {trace.by_key[key].storage for key in self.outcome.recomputed if trace.by_key[key].uses}
        recipes = ((ident, trace.recipes[ident]) for ident in made)
        runs = {ident if recipe.call is None else recipe.call: recipe for ident, recipe in recipes}
        self.operators = sum(recipe.host for recipe in runs.values())
        return taken

    def _first_use(self) -> int:
        uses = (site.uses[0] for site in self.trace.sites if site.uses)
        return min(uses, default=self.trace.positions)

    # ---------------------------------------------------------------------------------- compute

    def _stretch(self, number: int) -> None:
        """The program goes on to the next position."""
        clocks, machine = self.clocks, self.machine
        machine.compute(clocks.host[number] + self.hooks[number], clocks.device[number])
        if clocks.joins and number in clocks.joins:
            machine.host = machine.now

    def _again(self, work: Work) -> None:
        """Recompute."""
        begin = self.machine.now
        self.calls += work.host
        self.machine.compute(work.host, work.seconds)
        self.recomputing += self.machine.now - begin

    # ------------------------------------------------------------------------------------- out and back

    def _offload(self, group: Group) -> None:
        machine, seconds = self.machine, self.links.calls.group
        machine.call(seconds, is_device=self.trace.clocks is None)  # without a clock the step's tells of what it does
        self.calls += seconds
        group.leave(machine)
        self.leaving.append(group)

    def _relieve(self, limit: int, position: int) -> None:
        while self.resident > limit and self.leaving:
            group = self.leaving.popleft()
            self.machine.wait(group.out, group.way_out[0])
            group.away = True
            self.resident -= group.planned.nbytes
            for end, nbytes in group.lasting:
                if end > position + 1:  # it lies there all the same, such as a block's input that is still to be added
                    self.lingering[position + 1] += nbytes
                    self.lingering[end] -= nbytes

    def _prefetch(self, limit: int, position: int) -> None:
        if any(group.is_staged for group in islice(self.order, READ_AHEAD)):
            for group in islice(self.order, READ_AHEAD):
                group.read_ahead(self.machine)
        while self.order:
            group = self.order[0]
            if group.away and group.home < 0:
                too_early = group.planned.bring_at is not None and position < group.planned.bring_at
                if too_early or self.resident + group.planned.nbytes > limit or group.read > self.machine.now:
                    return
                self._bring(group)
            self.order.popleft()

    def _bring(self, group: Group) -> None:
        group.unpause_after_interrupt(self.machine)
        self.resident += group.planned.nbytes

    def _fetch(self, group: Group) -> None:
        """Have a group in HBM, now."""
        if not group.away:
            if group in self.leaving:  # it is in use, and its memory nobody else's: it stays until its last use
                self.leaving.remove(group)
            return
        if group.home < 0:
            group.read_ahead(self.machine)
            self.machine.wait(group.read, group.way_back[0])
            self._bring(group)
        self.machine.wait(group.home, group.way_back[-1])

    def _outlast(self, ended: Sequence[Group]) -> None:
        """Wait for the copies of groups that were used for the last time and have not left.

        The engine hears of a group's death when it is next called, which is here or a little later; and lanes of a host
        wait for nobody.
        """
        for group in ended:
            if not group.away:
                self.machine.wait(group.out, group.way_out[0])

    def _result(self, resident: Bytes, clock: np.ndarray) -> Simulated:
        others = np.array(self.trace.others, dtype=np.int64) if self.trace.others else 0
        lingering: Bytes = np.cumsum(self.lingering)[:-1]
        hbm: Bytes = resident + self.outcome.again + others + lingering
        stored_groups = [(group.is_in_dram, round_up(group.planned.nbytes, PAGE)) for group in self.groups]
        return Simulated(
            seconds=max(self.machine.now, self.machine.host + self.trace.lead),
            ideal=self.trace.seconds,
            device_seconds=None if self.trace.clocks is None else sum(self.trace.clocks.device),
            recomputing=self.recomputing,
            slowed=self.machine.slowed,
            issuing=sum(self.clocks.host[1:]),
            calls=self.calls,
            operators=self.operators,
            stalls=self.machine.stalls,
            busy=self.machine.busy,
            peak={
                "hbm": int(hbm.max()),
                "dram": sum(nbytes for in_dram, nbytes in stored_groups if in_dram),
                "nvme": sum(nbytes for in_dram, nbytes in stored_groups if not in_dram),
            },
            hbm=hbm,
            lingering=lingering,
            clock=clock,
            moves=tuple((g.offload_begins, max(g.out, 0.0), g.begins, max(g.home, 0.0)) for g in self.groups),
        )
