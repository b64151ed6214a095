"""Levers: the ways to free each storage of a trace, their costs, and the HBM in use after them.

Arrays over the storages that have bytes, so that a search can look at all of them at once. Pure functions on plain
data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torch_tiers.migrator.model.clocks import host_bound
from torch_tiers.migrator.model.links import Calls, Links
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.planner.blocks import blocks, bounds, segments, within
from torch_tiers.migrator.planner.intervals import Bytes, Floats, in_hbm, room
from torch_tiers.migrator.planner.sizes import group_bytes

KEEP, MOVE, DROP = range(3)
HIDDEN = 0.1  # cost of a second that hides behind the other clock: not 0, as that may become the slower one
APART = 8  # sizes of segments, which are recomputed one by one, that are looked at where little room is left
CHAIN = 0.03  # of the positions: how much earlier than for itself a storage may be recomputed for another

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Choice:
    """What to do with the storages of a trace; those that are in no field stay."""

    moved: frozenset[int] = frozenset()
    dropped: frozenset[int] = frozenset()


@dataclass(slots=True)
class State:
    """A choice in the making.

    Attributes
    ----------
    action : array of int
        What happens to each storage, by its number among the lifetimes.
    made : array of int
        For what is recomputed, the position at which it is.
    """

    action: NDArray[np.int8]
    made: Ints

    def copy(self) -> State:
        """A state of its own."""
        return State(self.action.copy(), self.made.copy())


class Levers:
    """The levers of one trace, as arrays.

    Parameters
    ----------
    trace : Trace
        The iteration, with times.
    budget : int
        HBM for saved tensors and `others`, in bytes.
    links : Links
        How fast the lanes are, and what moving costs besides.
    """

    def __init__(self, trace: Trace, budget: int, links: Links) -> None:
        self.trace = trace
        self.waits = False  # whether compute waits for each copy out, so that what moves is gone once it was saved
        self.room = room(trace, budget)
        self.below = links.below
        lives = trace.lifetimes
        self.number = {life.ident: number for number, life in enumerate(lives)}
        self.idents = [life.ident for life in lives]
        self.nbytes = np.array([life.nbytes for life in lives], dtype=np.int64)
        windows = np.array([in_hbm(life) for life in lives], dtype=np.int64).reshape(-1, 2)
        self.birth, self.end = windows[:, 0], windows[:, 1]  # stretches
        # Stretch from which what was dropped is there again; what is never used is there for one stretch.
        self.again = np.array([life.uses[0] + 1 if life.uses else life.birth + 1 for life in lives], dtype=np.int64)
        last_save = {site.storage: site.birth for site in trace.sites}
        self.released_at = np.array([trace.released_at[life.ident] for life in lives], dtype=np.int64)
        # And from which what was moved is there no more, however early it leaves: the program has it until then.
        self.held = np.array([trace.held.get(life.ident, 0) for life in lives], dtype=np.int64)
        self.turn = trace.turn
        self.before_turn = np.array([last_save[ident] <= self.turn for ident in self.idents], dtype=bool)
        self.times = np.array(trace.times)
        self.saved_at = self.times[[last_save[ident] for ident in self.idents]] if lives else np.zeros(0)
        self.lane_seconds = self.nbytes / links.d2h
        self.in_order = np.argsort(self.saved_at, kind="stable")
        costs, calls = links.costs, links.calls
        if trace.clocks is None:  # all that is known of the host is what groups cost the step
            calls = Calls(calls.group, 0.0, 0.0)
        of_device, of_host = _prices(trace)
        born = np.array([life.birth for life in lives], dtype=np.int64)
        tensors = Counter(site.storage for site in trace.sites)
        count = np.array([tensors[ident] for ident in self.idents], dtype=np.int64)
        moved_seconds = self.nbytes / links.d2h * costs.d2h + self.nbytes / links.h2d * costs.h2d
        group = group_bytes(int(self.room.max(initial=0)))  # as far as is known before there are any
        moved_calls = calls.group * np.maximum(self.nbytes / group, 1 / 16) + calls.moved * count
        self.move_cost = of_device[born] * moved_seconds + of_host[born] * moved_calls
        seen = trace.storage_bytes.keys()
        recipes = [trace.recipes.get(ident) for ident in self.idents]
        recipes = [recipe if recipe and seen >= set(recipe.inputs) else None for recipe in recipes]
        remade_seconds = np.array([np.inf if recipe is None else recipe.seconds for recipe in recipes])
        remade_calls = np.array([0.0 if recipe is None else recipe.host for recipe in recipes])
        remade_at = self.again - 1
        # What one operator returned is made by one run of it; each tensor takes the host some time besides.
        self.run_cost = of_device[remade_at] * remade_seconds + of_host[remade_at] * remade_calls
        self.besides_cost = of_host[remade_at] * calls.remade * count
        self.drop_cost = self.run_cost + self.besides_cost
        calls_of = [  # what made each storage: an operator's call, or for all that is known one of its own
            recipe.call if recipe and recipe.call is not None else ident
            for recipe, ident in zip(recipes, self.idents, strict=True)
        ]
        self.call = np.unique(np.array(calls_of, dtype=np.int64), return_inverse=True)[1]  # of each storage
        self.sources = [() if recipe is None else recipe.inputs for recipe in recipes]
        self.made_from: dict[int, list[int]] = {}  # source -> numbers of what is made from it
        for number, sources in enumerate(self.sources):
            for source in sources:
                self.made_from.setdefault(source, []).append(number)

    # ------------------------------------------------------------------------------------ what a state is

    def start(self) -> State:
        """Everything stays."""
        return State(np.zeros(len(self.idents), dtype=np.int8), np.zeros(len(self.idents), dtype=np.int64))

    def choice(self, state: State) -> Choice:
        """The state by names."""
        return Choice(
            frozenset(self.idents[i] for i in np.flatnonzero(state.action == MOVE)),
            frozenset(self.idents[i] for i in np.flatnonzero(state.action == DROP)),
        )

    def used(self, state: State) -> Bytes:
        """Saved bytes in HBM by stretch, with copies that leave one after the other and come back just in time."""
        again = state.action == DROP
        first = np.where(again, state.made + 1, self.birth)
        changes = np.zeros(len(self.room) + 1, dtype=np.int64)
        np.add.at(changes, first, self.nbytes)
        np.add.at(changes, self.end, -self.nbytes)
        np.add.at(changes, self.birth[again], self.nbytes[again])
        np.add.at(changes, np.minimum(self.released_at, first)[again], -self.nbytes[again])
        moved = self._moved(state)
        if len(moved):
            left = self.saved_at[moved] if self.waits else self._left(moved)
            gone = np.maximum(self._stretch(left), self.held[moved])
            out = np.minimum(gone, self.again[moved])
            np.add.at(changes, out, -self.nbytes[moved])
            np.add.at(changes, self.again[moved], self.nbytes[moved])
        return np.cumsum(changes)[:-1]

    def _left(self, moved: Ints) -> Floats:
        """When the copies of storages, in the order of their saves, end."""
        total = np.cumsum(self.lane_seconds[moved])
        return np.maximum.accumulate(self.saved_at[moved] - (total - self.lane_seconds[moved])) + total

    def _lane_over(self, state: State) -> float:
        """When the lane out has carried all that a state moves; 0 if that is nothing."""
        moved = self._moved(state)
        return float(self._left(moved)[-1]) if len(moved) else 0.0

    def _moved(self, state: State) -> Ints:
        """What a state moves, in the order of the saves."""
        moved: Ints = self.in_order[state.action[self.in_order] == MOVE]
        return moved

    def _stretch(self, times: Floats) -> Ints:
        """The first stretch at whose begin a time is over; the last save waits for whatever is still under way."""
        return np.minimum(np.searchsorted(self.times, times) + 1, self.turn + 1)

    def drop(self, state: State, number: int) -> bool:
        """Drop a storage, if it can be recomputed without making others much earlier than they are needed."""
        above = [n for n in self.made_from.get(self.idents[number], ()) if state.action[n] == DROP]
        earlier = {number: min((int(state.made[n]) for n in above), default=int(self.again[number]) - 1)}
        queue = [number]
        while queue:
            at = earlier[made := queue.pop()]
            if int(self.again[made]) - 1 - at > CHAIN * len(self.room):
                return False
            for source in (self.number[ident] for ident in self.sources[made] if ident in self.number):
                if source == number:
                    return False
                if state.action[source] == DROP and at < earlier.get(source, int(state.made[source])):
                    earlier[source] = at
                    queue.append(source)
        state.action[number] = DROP
        for made, at in earlier.items():
            state.made[made] = min(at, int(self.again[made]) - 1)
        return True

    def drop_costs(self, state: State) -> Floats:
        """What it costs to drop each storage, where a state drops others."""
        runs = np.zeros(len(self.call) + 1, dtype=bool)
        runs[self.call[state.action == DROP]] = True
        costs: Floats = np.where(runs[self.call] & np.isfinite(self.run_cost), self.besides_cost, self.drop_cost)
        return costs

    def drop_shares(self, state: State) -> Floats:
        """What each storage that a state drops costs, where those of one operator share what that takes."""
        together = np.bincount(self.call[state.action == DROP], minlength=len(self.call) + 1)[self.call]
        shares: Floats = self.besides_cost + self.run_cost / np.maximum(together, 1)
        return shares

    def left_below(self, state: State) -> int:
        """Bytes that the tiers below HBM still have room for."""
        return self.below - int(self.nbytes[state.action == MOVE].sum())

    def fits(self, state: State, extra: Bytes | int) -> bool:
        """Whether HBM has room for a state, and for `extra` bytes besides, in every stretch."""
        return bool((self.used(state) + extra <= self.room).all())


def _prices(trace: Trace) -> tuple[Floats, Floats]:
    """What a second of the device, and one of the host, costs the step in each stretch: little where it waits."""
    if trace.clocks is None:
        return np.ones(trace.positions + 1), np.ones(trace.positions + 1)
    bound = np.array(host_bound(trace.clocks))
    return np.where(bound, HIDDEN, 1.0), np.where(bound, 1.0, HIDDEN)


def extremes(trace: Trace) -> Sequence[Choice]:
    """Choices that hold as little as can be held: what fits nowhere else may fit with one of these."""
    everything = frozenset(life.ident for life in trace.lifetimes)
    found = blocks(trace)
    apart = [within(trace, list(segments(found, bound))) for bound in bounds(found, APART)]
    dropped = dict.fromkeys((frozenset[int](), *apart, everything.intersection(trace.recipes)))
    return [Choice(everything - each, each) for each in dropped]
