"""Records one period: every tensor saved, when, and when backward asked for it again."""

from __future__ import annotations

from dataclasses import dataclass, field

from migrator.engine import State
from migrator.storages import Known
from migrator.trace import Site, Trace

LIMIT = 100_000  # records; a period without backward never ends, and its trace would be of no use


@dataclass(eq=False, slots=True)
class Record:
    """One saved tensor of the period under way; `known` is None for what cannot move."""

    recorder: Recorder
    key: str
    birth: int
    known: Known | None
    uses: list[int] = field(default_factory=list)

    def used(self) -> None:
        """Backward asks for it."""
        self.uses.append(self.recorder.advance())


class Recorder:
    """Collects the sites of one period.

    Parameters
    ----------
    outlived : set of str
        Keys of sites whose storages the program itself keeps alive into backward, so that moving them
        frees nothing. Shared by the recorders of a program: what stays cannot be found out again.
    """

    def __init__(self, outlived: set[str]) -> None:
        self._position = 0
        self._records: list[Record] = []
        self._outlived = outlived

    def advance(self) -> int:
        """The next position."""
        self._position += 1
        return self._position - 1

    def save(self, key: str, known: Known | None) -> Record | None:
        """The program saves a tensor."""
        if len(self._records) >= LIMIT:
            return None
        record = Record(self, key, self.advance(), known)
        self._records.append(record)
        return record

    def turn(self) -> None:
        """Backward begins. What we let go of and is still alive, somebody else holds."""
        known_storages = [record.known for record in self._records if record.known is not None]
        # Of a storage that we hold ourselves, by another part of it, nothing can be said.
        ours = {k.cdata for k in known_storages if k.saved is None or k.saved.group.state is not State.AWAY}
        for record in self._records:
            known = record.known
            if known is None or known.cdata in ours:
                continue
            if known.freed():
                self._outlived.discard(record.key)
            else:
                self._outlived.add(record.key)

    def trace(self) -> Trace:
        """What was recorded, with sites that cannot move, or free nothing by it, at 0 bytes."""
        sites = []
        alone = -1  # storages that are not told apart get numbers of their own
        for record in self._records:
            known = record.known
            ident, nbytes = (alone, 0) if known is None else (known.ident, known.high - known.low)
            alone -= known is None
            if record.key in self._outlived:
                nbytes = 0
            sites.append(Site(record.key, ident, nbytes, record.birth, tuple(record.uses)))
        return Trace(tuple(sites), self._position)
