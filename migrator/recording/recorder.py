"""Records one iteration: every tensor saved, when it was saved and asked for again, and its times and memory."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch

from torch_tiers.migrator.model.trace import Site, Trace
from torch_tiers.migrator.offload.group import State
from torch_tiers.migrator.recompute.trials import Trials
from torch_tiers.migrator.recompute.verified import Verified
from torch_tiers.migrator.recording.operands import Beside, Operands
from torch_tiers.migrator.recording.record import Record
from torch_tiers.migrator.recording.storages import Known
from torch_tiers.migrator.streams import Meter

SELDOM = 8  # what the program has held for so many positions is looked at after one more
PARTS = 64  # of one storage, of which each moves alone, that are gone through to see who else holds it
LIMIT = 100_000  # records; an iteration without backward never ends, and its trace would be of no use
_PRESENT = (State.FILLING, State.LEAVING)  # the engine holds the program's own memory


@dataclass(eq=False, slots=True)
class _Entry:
    """One saved tensor of the iteration; `known` is None if it cannot move, `record` what its graph holds."""

    key: str
    birth: int
    known: Known | None
    kind: str
    uses: list[int] = field(default_factory=list)
    record: weakref.ref[Record] | None = None


@dataclass(eq=False, slots=True)
class _Held:
    """A storage saved at position `born` that the program itself held at position `seen`, or until `end`.

    From position `away` on it was in HBM only for that; None as long as the engine has it there.
    """

    known: Known
    key: str
    born: int
    seen: int
    away: int | None = None
    end: int = -1


class Recorder:
    """Collects the sites of one iteration.

    Parameters
    ----------
    outlived : set of str
        Keys of sites whose storages the program itself holds into backward, so that moving them frees nothing. Shared
        by the recorders of a program: of a tensor that stays this cannot be detected again.
    meter : Meter, optional
        Measures the iteration; without one only the order of events is recorded.
    resident : callable
        Returns the bytes of saved storages that the engine has had in HBM since the last call.
    verified : mapping of str to Verified
        Replays that held in earlier iterations, by site.
    refused : collection of str
        Sites for which no recomputation is tried.
    tries : bool
        Whether recomputations are tried. Trials take memory that the program alone would not.

    Attributes
    ----------
    waited : int
        What was `waiting` when a backward last began.
    """

    def __init__(
        self,
        outlived: set[str],
        meter: Meter | None = None,
        resident: Callable[[], int] = int,
        verified: Mapping[str, Verified] = MappingProxyType({}),
        refused: Collection[str] = (),
        *,
        tries: bool = True,
    ) -> None:
        self._position = 0
        self._entries: list[_Entry] = []
        self._turned = 0  # how many of those there were when a backward last began
        self.waited = 0
        self._outlived = outlived
        self._meter = meter
        self._resident = resident
        self._coming: deque[_Held] = deque()  # what the engine has not released yet
        self._followed: dict[int, dict[int, Known]] = {}  # by storage all that was saved of it, by its number
        self._stays: set[int] = set()  # storages that the graph holds, who knows how often
        self._look: dict[int, list[_Held]] = {}  # by when to look who holds it
        self._was_held: list[_Held] = []
        self._operands = Operands(-1)  # of the operator of backward that asked last
        self._beside: list[Beside] = []
        self._forward: list[weakref.ref[Record]] = []  # what the forward under way saved first, and last
        self._before: list[weakref.ref[Record]] = []  # the same of the one before
        self.trials = Trials(meter, verified, refused) if meter is not None and tries else None
        self.verified: dict[str, Verified] = {}  # by site, the replays that held; known with the trace

    def advance(self) -> int:
        """Go on to the next position; return its number."""
        if self._meter is not None:
            self._meter.tick(self._resident())
            self._see_what_is_held()
        self._position += 1
        return self._position - 1

    def ask(self, known: Known | None) -> int:
        """Go on to the position at which backward asks for a tensor; return its number.

        An operator asks for all that it needs, and computes then.
        """
        position = self.advance()
        if self._meter is None:
            return position
        # Its number, as whoever has the operator itself has all of its graph.
        operator: Any = _operator()
        number = -1 if operator is None else operator._sequence_nr()
        if number != self._operands.operator:
            self._beside += self._operands.beside()
            self._operands = Operands(number)
        self._operands.ask(known, position)
        return position

    def arrive(self, *, outside: bool = False) -> None:
        """Stop counting host time as the program's: a hook has begun, perhaps `outside` of positions."""
        if self._meter is not None:
            self._meter.arrive(outside=outside)

    def depart(self) -> None:
        """Count host time as the program's again; nothing was recorded meanwhile."""
        if self._meter is not None:
            self._meter.depart()

    def resume(self, *, brought: bool = False) -> None:
        """Take note that the program goes on from its position, for which something may have been `brought` back."""
        if self._meter is not None:
            self._meter.resume(brought=brought)

    def _see_what_is_held(self) -> None:
        """Detect until when the program itself holds what it saved, such as logits until their loss is known."""
        while self._coming:
            saved = self._coming[0].known.saved
            if saved is not None and saved.group.state in _PRESENT:
                break  # it lets go in the order of saves
            first = self._coming.popleft()
            if saved is not None and saved.group.state is State.AWAY:
                first.away = self._position
        for held in self._look.pop(self._position, ()):
            still = self._is_held(held.known)
            if still:
                # What has been held for long is looked at rarely: a program may hold thousands of them.
                held.seen = self._position
                again = self._position + 1 + (self._position - held.born) // SELDOM
                self._look.setdefault(again, []).append(held)
            elif still is not None:
                self._ended(held)

    def _is_held(self, known: Known) -> bool | None:
        """Return whether the program, too, has a tensor on the storage; None if that cannot be told."""
        parts = self._followed[known.cdata].values()
        saved = [part.saved for part in parts if part.saved is not None] if len(parts) < PARTS else []
        if known.cdata in self._stays or len(saved) < len(parts):
            return False if known.freed() else None
        return _holders(known) > sum(part.group.state in _PRESENT for part in saved)

    def _ended(self, held: _Held) -> None:
        # At some time since the last look: halfway, for all that is known.
        held.end = (held.seen + 1 + self._position) // 2
        self._was_held.append(held)

    def untracked(self) -> AbstractContextManager[None]:
        """Do work in this scope that is not measured as the program's."""
        return nullcontext() if self._meter is None else self._meter.untracked()

    def save(self, key: str, known: Known | None, kind: str = "", *, stays: bool = False) -> Record | None:
        """Record that the program saves a tensor; the graph itself will hold it if it `stays`."""
        if len(self._entries) >= LIMIT:
            return None
        entry = _Entry(key, self.advance(), known, kind)
        self._entries.append(entry)
        if known is not None:
            if stays:
                self._stays.add(known.cdata)
            self._follow(known, entry)
        record = Record(self, known, entry.uses)
        entry.record = weakref.ref(record)
        self._forward[1:] = [entry.record]
        return record

    @property
    def saved(self) -> int:
        """Return how many tensors were saved."""
        return len(self._entries)

    @property
    def first_module(self) -> str | None:
        """Return the module that saved the first of them."""
        return self._entries[0].key.rpartition(":")[0] if self._entries else None

    def waiting(self) -> int:
        """Return how many of them a graph holds that no backward has asked for."""
        unused = (entry.record for entry in self._entries if not entry.uses)
        return sum(ref is not None and ref() is not None for ref in unused)

    def forward_begins(self) -> bool:
        """Take note that a forward begins; return whether no graph holds anything of the one before the last.

        Of the last forward a program may hold the output until it has the next.
        """
        before, self._before, self._forward = self._before, self._forward, []
        return bool(before) and all(record() is None for record in before)

    def abandon(self) -> None:
        """Discard what was recorded; graphs that live on record nothing more."""
        if self._meter is not None:
            self._meter.abandon()
        self._meter = self.trials = None
        self._operands = Operands(-1)

    def _follow(self, known: Known, entry: _Entry) -> None:
        parts = self._followed.setdefault(known.cdata, {})
        if known.ident not in parts:  # once: other tensors on it are as much in HBM as this one
            parts[known.ident] = known
            if self._meter is not None:
                held = _Held(known, entry.key, entry.birth, entry.birth)
                self._coming.append(held)
                self._look.setdefault(self._position, []).append(held)

    def turn(self) -> None:
        """Take note that a backward begins. What was saved since the last, and lives without us, the program holds."""
        self._coming.clear()
        for held in (held for of in self._look.values() for held in of):
            still = self._is_held(held.known)
            if still:
                held.seen = self._position
            if still is not None:
                self._ended(held)
        self._look.clear()
        for entry in self._entries[self._turned :]:
            still = None if entry.known is None else self._is_held(entry.known)
            if still:
                self._outlived.add(entry.key)
            elif still is not None:
                self._outlived.discard(entry.key)
        self._turned, self.waited = len(self._entries), self.waiting()

    def trace(self) -> Trace:
        """Return the trace; if it was measured, wait for the device to finish the iteration.

        Sites that cannot move, or whose move frees nothing, have 0 bytes.
        """
        sites = []
        alone = -1  # storages that are not told apart get numbers of their own
        for entry in self._entries:
            known = entry.known
            ident, nbytes = (alone, 0) if known is None else (known.ident, known.high - known.low)
            alone -= known is None
            if entry.key in self._outlived:
                nbytes = 0
            sites.append(Site(entry.key, ident, nbytes, entry.birth, tuple(entry.uses), entry.kind))
        if self._meter is None:
            return Trace(tuple(sites), self._position)
        change, held = self._held_besides()
        measures = self._meter.finish(self._resident(), list(accumulate(change)))
        measured = measures.seconds > 0
        recipes = self.trials.results() if measured and self.trials is not None else {}
        self._meter = self.trials = None  # graphs that live on have nothing more to tell
        self._operands = Operands(-1)
        self.verified = {site.key: recipes[site.storage][1] for site in sites if site.storage in recipes}
        trace = Trace(
            tuple(sites),
            self._position,
            times=measures.times,
            seconds=measures.seconds,
            others=measures.others,
            recipes={ident: recipe for ident, (recipe, _) in recipes.items()},
            held=held,
        )
        return trace if measures.clocks is None else trace.on(measures.clocks)

    def _held_besides(self) -> tuple[list[int], dict[int, int]]:
        """Return what `Meter.finish` is to be told of storages in use besides, and `Trace.held`."""
        change, held = [0] * (self._position + 2), dict[int, int]()
        last_uses: dict[int, int] = {}
        for entry in self._entries:
            if entry.known and entry.uses:
                last_uses[entry.known.ident] = max(entry.uses[-1], last_uses.get(entry.known.ident, 0))
        for each in self._was_held:
            nbytes = each.known.high - each.known.low
            if each.key in self._outlived:
                # The program's own, which the engine counted as resident: until it was released, or nobody needed it.
                until = last_uses.get(each.known.ident, self._position) + 2 if each.away is None else each.away
                change[each.born + 1] -= nbytes
                change[min(until, self._position + 1)] += nbytes
                continue
            if each.end > each.born + 1:
                held[each.known.ident] = max(each.end, held.get(each.known.ident, 0))
            if each.away is not None and each.end > each.away:
                change[each.away] += nbytes
                change[each.end] -= nbytes
        for known, asked, until in (*self._beside, *self._operands.beside()):
            if last_uses[known.ident] == asked:  # from the position after that on `Trace.others` has it
                change[until + 1] -= known.high - known.low
                change[until + 2] += known.high - known.low
        return change[:-1], held


def _holders(known: Known) -> int:
    """Return how many tensors there are on a storage; 0 if it is freed."""
    # The object of Python's that stands for the storage counts as well. So it is made, if there is none.
    storage = torch.UntypedStorage._new_with_weak_ptr(known.cdata)
    return 0 if storage is None else _references(known.cdata) - 1


_operator: Callable[[], object] = torch._C._current_autograd_node
_references: Callable[[int], int] = torch._C._storage_Use_Count
