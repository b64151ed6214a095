"""Our own: searches by simulation, improves what was found, and verifies that it fits.

An iteration whose times are known is searched for the cheapest mix of moves and recomputation, once for each of several
shares of the forward that the lane out may be busy for; `migrator.planner.search` says how. What the simulator finds
over the budget goes back into the search, and the best is searched for in other ways. Where drives are reached past the
host's memory, what moves is spread over both ways out. Everything is counted in simulations, not in seconds, and so
decided the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from torch_tiers.migrator.model.links import PCIE_GEN5, Links
from torch_tiers.migrator.model.plan import NoPlanFits, Plan
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.planner.effects import effect, obtainable
from torch_tiers.migrator.planner.intervals import Bytes, where_fullest
from torch_tiers.migrator.planner.levers import Choice, State, extremes
from torch_tiers.migrator.planner.low_traffic import crossing, is_low_traffic
from torch_tiers.migrator.planner.schedule import fit
from torch_tiers.migrator.planner.search import Search
from torch_tiers.migrator.planner.spread import spread
from torch_tiers.migrator.policies import flashneuron
from torch_tiers.migrator.simulator import Simulated, simulate

RECOMPUTES = True

WAITING = 1e9
LANES = (1.0, 0.9, 0.75, 0.5, 0.0, 1.05, 1.15, 1.4, 2.0, WAITING)
"""For how long the lane out may be busy, as multiples of the forward; the last is for budgets that need it."""

FEWER = (0.65, 0.55, 0.45, 0.4, 0.3, 0.2, 0.1)
"""The same, besides, where others need the memory bus: between these the fewest moves are looked for."""

SIMULATED_SITES = 60_000  # sites times simulations of one planning: what keeps it within its time
LEAST = 40  # simulations, however large the trace
GLANCE = 8  # of these, beside others who need the memory bus, for what would be the fastest without them
SHORT = 16  # of these for an estimate of one budget
TRIMS = 100  # levers that are looked at again, the dearest first
POLITE = 0.019
"""Of the fastest plan's step: what it may take to move less where others need the memory bus.

Training is to lose 0.02 at most: with 0.0175 it lost 0.011 to 0.015 beside 80 GB/s of copies, 0.012 to 0.017 at 120.

Also of the step that is the fastest where nobody does. Moves that hide behind compute mostly do so on slow lanes, too:
a GPT that moved 6 GiB lost less than 1% beside 100 GB/s of copies, where 3 to 4% were foreseen. What it would lose to
others is no reason to be slower than it was without them.
"""
REPAIRS = 4  # times that what the simulator found over the budget goes back into the search
WAITING_REPAIRS = 12  # of what waits for each copy out, where there is the least room


def plan(trace: Trace, budget: int, links: Links) -> Plan:
    """The fastest plan found that fits; flashneuron's where the trace has no times.

    Raises
    ------
    NoPlanFits
        If the budget is too small for any plan.
    """
    if not trace.times:
        return replace(flashneuron.plan(trace, budget, links.staged), policy="auto")
    planner = _Planner(trace, budget, links)
    if planner.keeps_everything():
        return planner.best.plan
    planner.find()
    if not planner.fits:
        planner.squeeze()
    return planner.chosen().plan


def estimate(trace: Trace, budget: int, links: Links) -> float:
    """Seconds of an iteration within `budget` bytes, by a short search; infinite if it finds no plan.

    The trace must have times.
    """
    planner = _Planner(trace, budget, links)
    planner.left = SHORT
    if not planner.keeps_everything():
        planner.find()
    return planner.best.result.seconds if planner.fits else float("inf")


@dataclass(slots=True)
class _Tried:
    """A plan and what the simulator says of it; `state` and the rest are what the search came from."""

    plan: Plan
    result: Simulated
    state: State | None = None
    held: Bytes | int = 0


class _Planner:
    def __init__(self, trace: Trace, budget: int, links: Links) -> None:
        self.trace, self.budget, self.links = trace, budget, links
        self.left = max(LEAST, SIMULATED_SITES // max(1, len(trace.sites)))
        if links.contended:
            self.left -= GLANCE
        self.fitting: list[_Tried] = []  # all that fit, where the fastest may not be the one to take
        self.spilling: _Tried | None = None  # of what fits HBM, but not the tiers below, what takes least of them
        self.best = self._try(Choice())

    @property
    def fits(self) -> bool:
        """Whether the best so far is within the budget."""
        return self.best.result.peak["hbm"] <= self.budget

    def keeps_everything(self) -> bool:
        """Whether the program fits as it is."""
        return self.fits

    def find(self) -> None:
        """Search in all ways."""
        self.search()
        self.improve(self.best)
        self.wait()
        self.try_extremes()

    def search(self) -> None:
        """Solve with each of several deadlines for the lane out."""
        self.levers = Search(self.trace, self.budget, self.links)
        for lane in (*LANES, *FEWER) if self.links.contended else LANES:
            if self.left > 0:
                self._solve(lane, self.levers.start(), 0)

    def improve(self, best: _Tried) -> None:
        """Go about what was best in other ways."""
        for lane in LANES:
            for change in (self.levers.exchange, self.levers.reassign):
                if self.left > 0 and best.state is not None:
                    tried = self._change(best, lane, change)
                    if tried is not None and self._fits(tried) and tried.result.seconds < best.result.seconds:
                        best = tried

    def wait(self) -> None:
        """Search for what fits if compute waits for each copy out, as it has to where little room is left."""
        self.levers.waits = True
        if self.left > 0 and self._fits(tried := self._solve(WAITING, self.levers.start(), 0, WAITING_REPAIRS)):
            self.improve(tried)
        self.levers.waits = False

    def try_extremes(self) -> None:
        """Where nothing that was searched fits, try what holds least."""
        if self.best.state is None or not self.fits:
            for choice in extremes(self.trace):
                self._consider(self._try(choice))

    def squeeze(self) -> None:
        """If only more moves fit than the tiers below hold, take the fewest.

        Those tiers may still hold them, to the last byte; or else say what they would have to hold.

        Raises
        ------
        NoPlanFits
            If not even that fits.
        """
        if self.links.below < PCIE_GEN5.below:
            self.levers.below = PCIE_GEN5.below
            for lane in LANES:
                self._solve(lane, self.levers.start(), 0)
            self.wait()
        if self.fits:
            return
        if self.spilling is None:
            raise self._too_small()
        self.best, self.fitting = self.spilling, [self.spilling]

    def _solve(self, lane: float, state: State, held: Bytes | int, repairs: int = REPAIRS) -> _Tried:
        """Search from a state, and again with what the simulator found over the budget; return what was tried last."""
        while True:
            repairs -= 1
            solved = self.levers.solve(state, held, lane)
            if solved:
                self.levers.trim(state, held, TRIMS)
            tried = self._try(self.levers.choice(state))
            tried.state, tried.held = state.copy(), held
            self._consider(tried)
            over = (tried.result.hbm - self.budget).clip(min=0)
            if not solved or not over.any() or self.left <= 0 or not repairs:
                return tried
            # Beyond what the search left free there by its own reckoning: else it pulls nothing more.
            left = self.levers.room - self.levers.used(state)
            held = np.where(over > 0, np.maximum(held, left) + over, held)

    def _change(self, best: _Tried, lane: float, change: Callable[[State, Bytes | int, float], bool]) -> _Tried | None:
        """Move other storages than a plan does; None if that changes nothing."""
        assert best.state is not None
        state = best.state.copy()
        if not change(state, best.held, lane):
            return None
        self.levers.trim(state, best.held, TRIMS)
        tried = self._try(self.levers.choice(state))
        tried.state, tried.held = state, best.held
        self._consider(tried)
        return tried

    def _fits(self, tried: _Tried) -> bool:
        return tried.result.peak["hbm"] <= self.budget and tried.plan.stored_bytes <= self.links.below

    def _try(self, choice: Choice) -> _Tried:
        self.left -= 1
        return self._fit(choice, self.budget)

    def _fit(self, choice: Choice, budget: int) -> _Tried:
        dropped = obtainable(self.trace, choice.dropped)
        moved = choice.moved | (choice.dropped - dropped)
        tiers = spread(self.trace, moved, self.links)
        outcome = effect(self.trace, dropped)
        make = partial(fit, "auto", self.trace, budget, moved, dropped=dropped, tiers=tiers)
        lingering: Bytes | int = 0
        for _ in range(1 + REPAIRS):
            made = make(lingering=lingering, outcome=outcome)
            result = simulate(self.trace, self.links, made, outcome=outcome)
            # Limits have to leave room for what lingers; with these more leaves early enough to linger. Where nothing
            # does, they are not what is wrong.
            if not result.lingering[result.hbm > budget].any():
                break
            lingering = np.maximum(lingering, result.lingering)
        return _Tried(made, result)

    def chosen(self) -> _Tried:
        """The fastest; where others need the memory bus, the fastest of low traffic.

        If none of those that are hardly slower is, the one of these that moves least over the bus.
        """
        if not self.links.contended:
            return self.best
        # Ways of searching often end in the same plan.
        different = {(crossing(tried.plan, self.links), tried.result.seconds): tried for tried in self.fitting}
        alone = {key: self._alone(tried.plan) for key, tried in different.items()}
        enough = (1 + POLITE) * self.best.result.seconds
        enough_alone = (1 + POLITE) * min(self._fastest_alone(), *alone.values())
        hardly_slower = [key for key in different if key[1] <= enough]
        # On lanes that are very slow none is hardly slower than what they would allow if they were not.
        polite = [key for key in hardly_slower if alone[key] <= enough_alone] or hardly_slower
        # All by the same seconds: else one that is slower would be of lower traffic for it.
        low = [key for key in polite if is_low_traffic(different[key].plan, self.links, self.best.result.seconds)]
        return different[min(low, key=lambda key: key[::-1]) if low else min(polite)]

    def _alone(self, plan: Plan) -> float:
        """Seconds that a plan takes while nobody else needs the memory bus."""
        return simulate(self.trace, self.links.alone, plan).seconds

    def _fastest_alone(self) -> float:
        """Seconds of the fastest plan for that time, as far as a short search tells; endless if nothing fits."""
        planner = _Planner(self.trace, self.budget, self.links.alone)
        planner.left = GLANCE
        planner.search()
        return planner.best.result.seconds if planner.fits else float("inf")

    def _consider(self, tried: _Tried) -> None:
        if tried.result.peak["hbm"] > self.budget:
            return
        if tried.plan.stored_bytes > self.links.below:
            if self.spilling is None or tried.plan.stored_bytes < self.spilling.plan.stored_bytes:
                self.spilling = tried
            return
        if self.links.contended:
            self.fitting.append(tried)
        if not self.fits or tried.result.seconds < self.best.result.seconds:
            self.best = tried

    def _too_small(self) -> NoPlanFits:
        least = min((self._least(choice) for choice in extremes(self.trace)), key=lambda hbm: int(hbm.max()))
        return NoPlanFits(self.budget, int(least.max()), where_fullest(self.trace, least))

    def _least(self, choice: Choice) -> Bytes:
        """What HBM holds under the smallest budget that a choice meets."""
        budget = self.budget
        while True:
            hbm = self._fit(choice, budget).result.hbm
            if hbm.max() <= budget:
                return hbm
            budget = int(hbm.max())  # with more room groups are larger, and may need more in turn
