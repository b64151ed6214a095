"""Greedy search: which storages to move or recompute until an iteration fits.

Every lever has a cost in seconds and a relief in bytes over some stretches. Stretches weigh as much as they are over
the budget, so relief counts where it is needed; the lever with the least cost for its relief is pulled first, as
TERAIO (NeurIPS'25, section 3.2) does it for moves alone. A move is nearly free until the lane out is as long as the
forward, and not to be had beyond. Pure functions on plain data.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from torch_tiers.migrator.planner.intervals import Bytes, Floats
from torch_tiers.migrator.planner.levers import DROP, KEEP, MOVE, Ints, Levers, State

ROUNDS = 4  # one takes away one in so many of the bytes that are over, before levers are rated anew


class Search(Levers):
    """The greedy search over the levers of one trace."""

    def solve(self, state: State, extra: Bytes | int = 0, lane: float = 1.0) -> bool:
        """Pull levers until the iteration fits; whether it does.

        Parameters
        ----------
        state : State
            Where to begin; it is changed.
        extra : array of int
            Bytes that HBM holds besides, by stretch.
        lane : float
            Until when the lane out may be busy, as a multiple of the time of the last save.
        """
        deadline = lane * float(self.times[self.turn])
        move_cost = self.move_cost + self.lane_seconds if self.waits else self.move_cost
        while True:
            over = (self.used(state) + extra - self.room).clip(min=0)
            worst = int(over.argmax()) if len(over) else 0
            if not len(over) or over[worst] == 0:
                return True
            weight = np.concatenate(([0.0], np.cumsum(over / over.sum())))
            kept = state.action == KEEP
            out, fits = self._moves(state, deadline)
            fits &= self.nbytes <= self.left_below(state)
            rates = np.concatenate(
                (
                    _rate(move_cost, self._relief(weight, out, self.again), kept & fits & self.before_turn),
                    _rate(self.drop_costs(state), self._relief(weight, self.birth, self.again), kept),
                )
            )
            if not (self._pull(state, rates, int(over[worst]) // ROUNDS, deadline) or self._move_instead(state, worst)):
                return False

    def _move_instead(self, state: State, worst: int) -> bool:
        """Move what is recomputed before a stretch, and lies there; the largest first. Return whether anything does.

        It is made early for another, as the input of the loss for its logarithm. No lever frees it there but that.
        """
        there = (state.action == DROP) & (state.made < worst) & (worst < self.again) & self.before_turn
        there &= self.nbytes <= self.left_below(state)
        if not there.any():
            return False
        state.action[np.argmax(np.where(there, self.nbytes, 0))] = MOVE
        return True

    def _relief(self, weight: Floats, first: Ints, end: Ints) -> Floats:
        """Bytes times the weight of the stretches in which they are gone."""
        relief: Floats = self.nbytes * (weight[end] - weight[np.minimum(first, end)])
        return relief

    def _moves(self, state: State, deadline: float) -> tuple[Ints, NDArray[np.bool_]]:
        """For every storage the stretch in which it would have left, and whether the lane would be done in time."""
        if self.waits:
            return np.maximum(self._stretch(self.saved_at), self.held), np.ones(len(self.idents), dtype=bool)
        moved = self._moved(state)
        at = np.searchsorted(self.saved_at[moved], self.saved_at, side="right")
        behind = np.concatenate((np.cumsum(self.lane_seconds[moved][::-1])[::-1], [0.0]))
        left = np.concatenate(([0.0], self._left(moved)))
        ends = np.maximum(left[at], self.saved_at) + self.lane_seconds
        return self._stretch(ends), ends + behind[at] <= deadline

    def _pull(self, state: State, rates: Floats, enough: int, deadline: float) -> bool:
        """Pull the best levers, together for not much more than `enough` bytes; whether there was one."""
        count, relieved, pulled = len(self.idents), 0, False
        over, below = self._lane_over(state), self.left_below(state)
        for lever in np.argsort(rates, kind="stable").tolist():
            if not np.isfinite(rates[lever]) or (pulled and relieved >= enough):
                break
            if state.action[number := lever % count] == KEEP:
                if lever >= count:
                    if not self.drop(state, number):
                        continue
                else:
                    state.action[number] = MOVE
                    # Bounds: the lane is over no later, no less is left below. To know better is to look at everything.
                    latest = max(over, float(self.saved_at[number])) + float(self.lane_seconds[number])
                    least = below - int(self.nbytes[number])
                    if latest > deadline:
                        latest = self._lane_over(state)
                    if least < 0:
                        least = self.left_below(state)
                    if pulled and (latest > deadline or least < 0):
                        state.action[number] = KEEP
                        continue
                    over, below = latest, least
                relieved += int(self.nbytes[number])
                pulled = True
        return pulled

    def reassign(self, state: State, extra: Bytes | int, lane: float) -> bool:
        """Have the lane out carry what is dearest to recompute, not what was chosen first; whether it changed.

        As long as the lane has time a move is cheap for anything; in the end its time is what is scarce.
        """
        before = state.action.copy()
        for number in np.flatnonzero((state.action == MOVE) & np.isfinite(self.drop_cost)).tolist():
            state.action[number] = KEEP
            if not self.drop(state, number):
                state.action[number] = MOVE
        self.exchange(state, extra, lane)
        return bool((state.action != before).any())

    def exchange(self, state: State, extra: Bytes | int, lane: float) -> bool:
        """Move what is dear to recompute instead, as long as the lane out has time for it; whether anything changed.

        The search weighs levers one by one, and a move that frees HBM only once it is over seems to relieve less.
        Storages are exchanged many at a time, and may fit together where none of them does alone.
        """
        deadline, changed = lane * float(self.times[self.turn]), False
        gain = np.where((state.action == DROP) & self.before_turn, self.drop_shares(state) - self.move_cost, 0.0)
        order = np.argsort(-gain / np.maximum(self.lane_seconds, 1e-9), kind="stable")
        rest = order[gain[order] > 0]
        # Half as many where all of them cannot, twice as many where they can: one by one ten thousand take seconds.
        count = len(rest)
        while len(rest):
            some = rest[:count]
            state.action[some] = MOVE
            if self._lane_over(state) <= deadline and self.left_below(state) >= 0 and self.fits(state, extra):
                rest, count, changed = rest[count:], 2 * count, True
                continue
            state.action[some] = DROP
            if len(some) == 1:
                rest = rest[1:]
            count = max(1, len(some) // 2)
        return changed

    def trim(self, state: State, extra: Bytes | int, most: int) -> None:
        """Release levers that turned out not to be needed, the dearest first; look at `most` of them."""
        cost = np.where(
            state.action == MOVE, self.move_cost, np.where(state.action == DROP, self.drop_shares(state), -1.0)
        )
        for number in np.argsort(-cost, kind="stable")[:most].tolist():
            if cost[number] < 0:
                break
            was = state.action[number]
            state.action[number] = KEEP
            if not self.fits(state, extra):
                state.action[number] = was


def _rate(cost: Floats, relief: Floats, allowed: NDArray[np.bool_]) -> Floats:
    """Seconds per byte of weighted relief; infinite where the lever is not to be had."""
    rates: Floats = np.full(len(cost), np.inf)
    return np.divide(np.maximum(cost, 1e-9), relief, out=rates, where=allowed & (relief > 0))
