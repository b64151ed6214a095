"""SwapAdvisor (Huang et al., ASPLOS'20): a genetic search over memory allocation, with Belady swaps.

A chromosome maps every tensor size to a size class and gives each class a number of objects, which together fill the
room. The swap plan follows from it: a tensor takes a free object of its class, and where there is none the
tensor is swapped out whose next use is furthest (Belady); a tensor comes back as soon as the object is free that it
will lie in ("Swap planning"). Fitness is the simulated time of the step. Parents are chosen by softmax of their
fitness; a child takes the classes below a cut from one and those above it from the other; it mutates with a
probability per size.

The paper's chromosome holds the order of operations, too: eager PyTorch runs the program's order, so that half is
left out. Objects exist in the search only; in the run PyTorch's allocator places tensors. An iteration begins with none
of its tensors, so the paper's second scan, which makes its end meet its beginning, has nothing to do.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random

from torch_tiers.migrator.model.links import Links
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.planner.decisions import Trip
from torch_tiers.migrator.planner.draft import Draft
from torch_tiers.migrator.simulator import simulate

SECONDS = 1.5
POPULATION = 12
GENERATIONS = 8
MUTATION = 0.1  # per size
TEMPERATURE = 0.05  # of the best time: a plan that much slower is chosen 1/e as often


@dataclass(frozen=True)
class Chromosome:
    """Size to size class, and size class to number of objects."""

    classes: Mapping[int, int]
    objects: Mapping[int, int]


def plan(trace: Trace, budget: int, links: Links, *, seed: int = 0, seconds: float = SECONDS) -> Plan:
    """Search for `GENERATIONS` generations, or until `seconds` are over; the best plan so far.

    The same for the same seed, unless the time was too short for all generations.
    """
    draft = Draft(trace, budget, links)
    if draft.memory.fits or not draft.idle:
        return draft.plan("swapadvisor")
    search = _Search(draft.trace, int(draft.memory.room.min()), Random(seed), time.monotonic() + seconds)

    def made(chromosome: Chromosome) -> tuple[float, Plan]:
        plan = _plan_of(trace, budget, links, swaps(draft, chromosome))
        return simulate(draft.trace, links, plan).seconds, plan

    return search.run(made)


def swaps(draft: Draft, chromosome: Chromosome) -> dict[int, Trip]:
    """Belady's swap plan: what leaves, and from when on it may come back."""
    lives = {life.ident: life for life in draft.trace.lifetimes if life.ident in draft.idle}
    events = [(life.birth, 0, life.ident) for life in lives.values()]
    events += [(draft.idle[ident].end, 1, ident) for ident in lives]
    events += [(life.death, 2, life.ident) for life in lives.values()]
    free = {size: deque([-1] * number) for size, number in chromosome.objects.items()}  # position since when
    furthest: dict[int, list[tuple[int, int]]] = {size: [] for size in chromosome.objects}
    placed: set[int] = set()
    idle: set[int] = set()  # in HBM, and backward has not asked for it yet
    trips: dict[int, Trip] = {}
    for at, what, ident in sorted(events):
        size = chromosome.classes[lives[ident].nbytes]
        if what == 2:
            if ident in placed:
                placed.discard(ident)
                free[size].append(at + 1)  # its gradient is computed with it up to the next position
            continue
        if what == 1:
            idle.discard(ident)
        if ident in placed:
            continue
        since = at
        if free[size]:
            since = free[size].popleft()
        else:
            victim = _victim(furthest[size], idle)
            if victim is None:  # everything of this class is in use
                trips.setdefault(ident, Trip(draft.idle[ident].end - 1))
                continue
            placed.discard(victim)
            trips[victim] = Trip(draft.idle[victim].end - 1)
        placed.add(ident)
        if what == 0:
            idle.add(ident)
            heappush(furthest[size], (-draft.idle[ident].end, ident))
        else:
            trips[ident] = Trip(min(max(since, draft.idle[ident].begin + 1), draft.idle[ident].end - 1))
    return trips


def _victim(furthest: list[tuple[int, int]], idle: set[int]) -> int | None:
    while furthest:
        _, ident = heappop(furthest)
        if ident in idle:
            idle.discard(ident)
            return ident
    return None


def _plan_of(trace: Trace, budget: int, links: Links, trips: dict[int, Trip]) -> Plan:
    """The plan of a swap plan; where objects were short, more goes until it fits."""
    draft = Draft(trace, budget, links)
    for ident, trip in trips.items():
        idle = draft.idle[ident]
        draft.offload(idle, idle.begin + 2, (trip.bring_at or 0) + 1)
    draft.offload_until_it_fits(draft.stays)
    return draft.plan("swapadvisor")


class _Search:
    """The genetic search over chromosomes."""

    def __init__(self, trace: Trace, room: int, rng: Random, stop: float) -> None:
        self._room, self._rng, self._stop = room, rng, stop
        self._bytes = Counter(life.nbytes for life in trace.lifetimes if life.uses)
        self._sizes = sorted(self._bytes)

    def run(self, made: Callable[[Chromosome], tuple[float, Plan]]) -> Plan:
        """The best plan of all generations; at least one chromosome is tried."""
        identity = self._filled({size: size for size in self._sizes}, dict(self._bytes))
        seconds, best = made(identity)
        fastest, people = seconds, [(seconds, identity)]
        for born in range(1, POPULATION * GENERATIONS):
            if time.monotonic() >= self._stop:
                break
            if born < POPULATION:
                child = self._mutated(identity, most=1.0)
            else:
                child = self._mutated(self._crossed(self._parent(people), self._parent(people)), most=MUTATION)
            seconds, plan = made(child)
            if seconds < fastest:
                fastest, best = seconds, plan
            people = sorted([*people, (seconds, child)], key=lambda one: one[0])[:POPULATION]
        return best

    def _parent(self, people: list[tuple[float, Chromosome]]) -> Chromosome:
        scale = TEMPERATURE * people[0][0] or 1.0
        weights = [math.exp((people[0][0] - seconds) / scale) for seconds, _ in people]
        return self._rng.choices([chromosome for _, chromosome in people], weights)[0]

    def _crossed(self, one: Chromosome, other: Chromosome) -> Chromosome:
        cut = self._rng.choice(self._sizes)
        classes = {size: (one if size < cut else other).classes[size] for size in self._sizes}
        return self._filled(classes, {**other.objects, **one.objects})

    def _mutated(self, chromosome: Chromosome, most: float) -> Chromosome:
        classes, objects = dict(chromosome.classes), dict(chromosome.objects)
        for size in self._sizes:
            if self._rng.random() < most:
                larger = [other for other in self._sizes if size <= other <= 2 * size]
                classes[size] = self._rng.choice(larger)
            if self._rng.random() < most:
                objects[classes[size]] = int(objects.get(classes[size], 1) * self._rng.uniform(0.5, 2.0)) + 1
        return self._filled(classes, objects)

    def _filled(self, classes: Mapping[int, int], objects: Mapping[int, int]) -> Chromosome:
        """A chromosome whose objects fill the room, and are no more than there are tensors."""
        tensors: Counter[int] = Counter()
        for size, kind in classes.items():
            tensors[kind] += self._bytes[size]
        wanted = {kind: min(objects.get(kind, 1), tensors[kind]) for kind in tensors}
        scale = min(1.0, self._room / max(1, sum(kind * number for kind, number in wanted.items())))
        number = {kind: max(1, int(number * scale)) for kind, number in wanted.items()}
        left = self._room - sum(kind * count for kind, count in number.items())
        for kind in sorted(number, reverse=True):
            more = min(tensors[kind] - number[kind], left // kind) if left > 0 else 0
            number[kind] += more
            left -= more * kind
        return Chromosome(dict(classes), number)
