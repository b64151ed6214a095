"""Records one period: every tensor saved, when, and when backward asked for it again; and what that took."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from migrator.engine.group import State
from migrator.engine.tensors import Known
from migrator.lanes import Meter
from migrator.recompute.dropped import Peek
from migrator.recompute.finder import Verified
from migrator.recompute.trials import Trial, Trials
from migrator.recompute.watch import Sums, Watch, same_sums
from migrator.trace import Region, Site, Trace

SELDOM = 8  # what the program has held for so many positions is looked at after one more
LIMIT = 100_000  # records; a period without backward never ends, and its trace would be of no use


@dataclass(eq=False, slots=True)
class _Entry:
    """One saved tensor of the period under way; `known` is None for what cannot move."""

    key: str
    birth: int
    known: Known | None
    kind: str
    uses: list[int] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Record:
    """What the graph holds of an entry; and of its trials, whose inputs nobody else may keep alive."""

    recorder: Recorder
    known: Known | None
    uses: list[int]
    trials: list[Trial] = field(default_factory=list)

    def used(self) -> None:
        """Backward asks for it."""
        self.uses.append(self.recorder.advance())

    def compare(self, tensor: Tensor, peek: Peek) -> Tensor:
        """Carry its trials out, with what backward is about to be given; returns that."""
        trials, self.trials = self.trials, []
        for trial in trials:
            if self.recorder.trials is not None:
                self.recorder.trials.attempt(trial, tensor, peek)
        self.recorder.resume()
        return tensor


class _LetGo(NamedTuple):
    """What the engine let go of at position `since`, and somebody still held at position `seen`."""

    known: Known
    key: str
    since: int
    seen: int


@dataclass(eq=False, slots=True)
class _Visit:
    """A module's forward, under way or over."""

    begin: int
    inputs: Sequence[Known | None]
    watch: Watch | None  # until backward begins, or it is known that the forward cannot be repeated
    start: Any
    end: int = -1
    over: Any = None
    sums: Sums = ({}, {})


class Recorder:
    """Collects the sites of one period.

    Parameters
    ----------
    outlived : set of str
        Keys of sites whose storages the program itself keeps alive into backward, so that moving them
        frees nothing. Shared by the recorders of a program: what stays cannot be found out again.
    meter : Meter, optional
        Measures the period; without one only the order of events is recorded.
    resident : callable
        Bytes of saved storages that the engine has had in HBM since it was last called.
    verified : mapping of str to Verified
        Formulas that held in earlier periods, by site.
    tries : bool
        Whether it is to be found out what could be recomputed. That takes memory which the program alone would not.
    """

    def __init__(
        self,
        outlived: set[str],
        meter: Meter | None = None,
        resident: Callable[[], int] = int,
        verified: Mapping[str, Verified] = MappingProxyType({}),
        *,
        tries: bool = True,
    ) -> None:
        self._position = 0
        self._entries: list[_Entry] = []
        self._outlived = outlived
        self._meter = meter
        self._resident = resident
        self._coming: deque[tuple[Known, str]] = deque()  # what the engine has not let go of yet, and by which site
        self._followed: set[int] = set()
        self._let_go: dict[int, list[_LetGo]] = {}  # and what it has, by when to look who holds it
        self._held: list[tuple[str, Known, int, int]] = []  # away, and yet in HBM: site, storage, first stretch, end
        self._visits: dict[str, _Visit | None] = {}  # None: not one region, as it was entered twice
        self.trials = Trials(meter, verified) if meter is not None and tries else None
        self.verified: dict[str, Verified] = {}  # by site, the formulas that held; known with the trace

    def advance(self) -> int:
        """The next position."""
        if self._meter is not None:
            self._meter.tick(self._resident())
            self._see_what_is_held()
        self._position += 1
        return self._position - 1

    def resume(self) -> None:
        """The program goes on from the position that it has reached."""
        if self._meter is not None:
            self._meter.resume()

    def _see_what_is_held(self) -> None:
        """What the engine let go of is in HBM as long as the program holds it: logits until their loss is known."""
        while self._coming:
            known, key = self._coming[0]
            if known.saved is not None and known.saved.group.state in (State.FILLING, State.LEAVING):
                break  # it lets go in the order of saves
            self._coming.popleft()
            if known.saved is not None and known.saved.group.state is State.AWAY:
                self._let_go.setdefault(self._position, []).append(
                    _LetGo(known, key, self._position, self._position - 1)
                )
        for gone in self._let_go.pop(self._position, ()):
            if gone.known.freed():
                self._was_held(gone)
            else:
                # What has been held for long is looked at rarely: a program may hold thousands of them.
                again = self._position + 1 + (self._position - gone.since) // SELDOM
                self._let_go.setdefault(again, []).append(gone._replace(seen=self._position))

    def _was_held(self, gone: _LetGo) -> None:
        # It ended at some time since the last look: halfway, for all that is known.
        end = (gone.seen + 1 + self._position) // 2 if gone.known.freed() else self._position
        if end > gone.since:
            self._held.append((gone.key, gone.known, gone.since, end))

    def aside(self) -> AbstractContextManager[None]:
        """What is done inside is not the program's."""
        return nullcontext() if self._meter is None else self._meter.aside()

    def save(self, key: str, known: Known | None, kind: str = "") -> Record | None:
        """The program saves a tensor."""
        if len(self._entries) >= LIMIT:
            return None
        entry = _Entry(key, self.advance(), known, kind)
        self._entries.append(entry)
        if known is not None and self._meter is not None and known.ident not in self._followed:
            self._followed.add(known.ident)  # once: other tensors on it are as much in HBM as this one
            self._coming.append((known, key))
        return Record(self, known, entry.uses)

    def enter(self, path: str, inputs: Sequence[Known | None], watch: Watch) -> None:
        """The forward of a module begins that could be recomputed as a whole from `inputs`, if it leaves no trace."""
        if self._meter is not None:
            visit = _Visit(self._position, inputs, watch, self._meter.mark())
            self._visits[path] = None if path in self._visits else visit

    def visits(self, path: str) -> bool:
        """Whether `enter` has been told of that module."""
        return self._visits.get(path) is not None

    def leave(self, path: str, others: Iterable[Tensor] | None) -> None:
        """It ends, and was given these tensors, too; None where it cannot be given again what it was given."""
        visit = self._visits.get(path)
        if visit is None or visit.watch is None or self._meter is None:
            return
        over = self._meter.mark()
        with self._meter.aside():
            if others is not None and visit.watch.forward_over():
                visit.end, visit.over = self._position, over
                visit.watch.look_at_given(others)
            else:
                visit.watch = None  # what it holds need not live on

    def turn(self) -> None:
        """Backward begins. What we let go of and is still alive, somebody else holds."""
        watched = [visit for visit in self._visits.values() if visit is not None and visit.watch is not None]
        if watched:
            with self.aside():
                for visit in watched:
                    if visit.watch and not visit.watch.unchanged():  # such as what a model tells its layers for a while
                        visit.end = -1
                    visit.sums = visit.watch.sums if visit.watch else visit.sums
                    visit.watch = None
        self._coming.clear()
        for gone in (gone for of in self._let_go.values() for gone in of):
            self._was_held(gone)
        self._let_go.clear()
        known_storages = [entry.known for entry in self._entries if entry.known is not None]
        # Of a storage that we hold ourselves, by another part of it, nothing can be said.
        ours = {k.cdata for k in known_storages if k.saved is None or k.saved.group.state is not State.AWAY}
        for entry in self._entries:
            known = entry.known
            if known is None or known.cdata in ours:
                continue
            if known.freed():
                self._outlived.discard(entry.key)
            else:
                self._outlived.add(entry.key)

    def trace(self) -> Trace:
        """What was recorded; where it was measured, this waits for the device to end the period.

        Sites that cannot move, or free nothing by it, have 0 bytes.
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
        change, held = [0] * (self._position + 1), dict[int, int]()
        for key, known, first, end in self._held:
            if key not in self._outlived:  # that counts as the program's own
                change[first] += known.high - known.low
                change[end] -= known.high - known.low
                held[known.ident] = max(end, held.get(known.ident, 0))
        measures = self._meter.finish(self._resident(), list(accumulate(change)))
        measured = measures.seconds > 0
        recipes = self.trials.results() if measured and self.trials is not None else {}
        regions = self._regions(self._meter) if measured else []
        self._meter = self.trials = None  # graphs that live on have nothing more to tell
        self.verified = {site.key: recipes[site.storage][1] for site in sites if site.storage in recipes}
        return Trace(
            tuple(sites),
            self._position,
            times=measures.times,
            seconds=measures.seconds,
            others=measures.others,
            recipes={ident: recipe for ident, (recipe, _) in recipes.items()},
            regions=tuple(regions),
            held=held,
        )

    def _regions(self, meter: Meter) -> list[Region]:
        # The others were entered twice, left by an exception, cannot be repeated, or nothing was saved in them.
        visits = {
            path: visit
            for path, visit in self._visits.items()
            if visit is not None and visit.end > visit.begin and same_sums(visit.sums)
        }
        spans = meter.spans([(visit.start, visit.over) for visit in visits.values()])
        regions = []
        for (path, visit), seconds in zip(visits.items(), spans, strict=True):
            alone, idents = -len(self._entries), []
            for known in visit.inputs:  # one each, as the checkpoint will save them
                alone -= known is None
                idents.append(alone if known is None else known.ident)
            nbytes = {known.ident: known.high - known.low for known in visit.inputs if known is not None}
            regions.append(Region(path, visit.begin, visit.end, tuple(idents), sum(nbytes.values()), seconds))
        return regions
