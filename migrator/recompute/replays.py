"""Replays: recomputations of saved tensors by the operators that made them, from other saved tensors.

While the operators of a forward are recorded, each saved tensor is a value among theirs. A replay is found by walking
back from a tensor to others that were saved, and to values that no operator of this forward made, such as parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor

from torch_tiers.migrator.recompute.choices import Choices, choices, chosen
from torch_tiers.migrator.tape.closure import Bound, Differs, Packs

if TYPE_CHECKING:
    from torch_tiers.migrator.program.weights import Gathering
    from torch_tiers.migrator.tape.recorder import Recorder


Call: TypeAlias = tuple[int, int]

Peek: TypeAlias = Callable[[Any], Tensor]
"""Hands a packed tensor out without counting that as a use."""

MODIFIED = "modified by an inplace operation"  # what PyTorch says, and we do, of what was changed since it was saved

_is_autocast = torch._C._is_any_autocast_enabled

NAMED = 6  # operators of a closure that its name tells, besides the last
FORWARDS = 64  # in one record, one after the other without a backward
MOST = 4096  # names and storages that are remembered: a program of ever new ones must not fill memory with them


class Maker(Protocol):
    """The object that is to receive a result of a replay."""

    @property
    def is_wanted(self) -> bool: ...  # noqa: D102
    def take(self, made: Tensor) -> Tensor: ...  # noqa: D102


class Replay:
    """A recomputation of a saved tensor: a closure of operators whose leaves are packed tensors.

    It may recompute several tensors that one operator returned, such as a dropout's result and its mask, together.

    Attributes
    ----------
    names : list of str
        For each tensor its operators, and a signature: equal for those that compute the same.
    makes : list of weakref
        The receiver of each tensor; None for nobody.
    inputs : tuple
        The packed tensors that it begins with.
    keys : tuple of str
        The sites at which these were saved.
    call : tuple of (int, int)
        Its last operator: of which record, and its number there.
    """

    __slots__ = (
        *("__weakref__", "_choices", "_closure", "_gathering", "_recorder", "_settings"),
        *("call", "inputs", "keys", "makes", "names"),
    )

    def __init__(
        self,
        name: str,
        closure: Bound,
        call: Call,
        recorder: Recorder,
        settings: int,
        those: Choices,
        gathering: Gathering | None = None,
    ) -> None:
        self.names = [name]
        self.makes: list[weakref.ref[Maker] | None] = [None]
        self.inputs = closure.inputs
        self.keys = closure.keys
        self.call = call
        self._gathering = gathering if closure.refilled else None
        self._closure = closure
        self._recorder = recorder
        self._settings = settings  # of PyTorch's, when it was found
        self._choices = those

    @property
    def operators(self) -> tuple[str, ...]:
        """Return the operators in the order in which they run; PyTorch's own without their namespace."""
        return tuple(map(_bare, self._closure.names))

    def untracked(self) -> AbstractContextManager[None]:
        """Do work in this scope that is no part of the forward that is recorded."""
        return self._recorder.untracked()

    def join(self, other: Replay) -> bool:
        """Recompute the tensor of another replay, too, if both run the same operators; return whether it does now.

        The other must not have run, and must not be used afterwards.
        """
        if not other._closure.also(self._closure):
            return False
        self.names += other.names
        self.makes += other.makes  # first: whoever runs it meanwhile, in another thread, finds a place for all it makes
        self._closure, self.inputs = other._closure, other.inputs
        return True

    def run(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors, recomputed from their unpacked inputs.

        Raises
        ------
        Differs
            If they would differ from the saved ones.
        """
        if self._gathering is not None and self._gathering.changed():
            raise RuntimeError(f"a parameter that a saved tensor is made from again has been {MODIFIED}.")
        try:
            if self._recorder.settings() == self._settings:  # as in nearly every program
                return self._closure.make(values)
            with chosen(self._choices):
                return self._closure.make(values)
        except Differs as error:
            if self._closure.is_stale:
                raise RuntimeError(f"what a saved tensor is made from again has been {MODIFIED}.") from error
            raise Differs(
                f"a saved tensor that was dropped to save memory cannot be made again: {error}. Set TIERS_REPLAY=0, "
                "or choose a policy that recomputes nothing, such as TIERS_POLICY=flashneuron"
            ) from error


def _bare(operator: str) -> str:
    return operator.removeprefix("aten::").partition(".")[0]


def operators_of(name: str) -> str:
    """Return a replay's name in a trace: its operators alone."""
    return name.partition("#")[0]


def kind_of(name: str) -> str:
    """Return the part of a name that tells replays of the same operators apart: their shapes."""
    return name.partition("#")[2]


class Replays:
    """The replays of one thread's forward.

    Attributes
    ----------
    choices : object
        The program's kernel choices when the forward began: one object for all that are equal.
    packs : Packs or None
        What was packed of this record's tensors; None while nothing is recorded.

    Parameters
    ----------
    recorder : Recorder
        The process's recorder of operators, which one thread at a time can use.
    is_fixed : callable
        Returns whether a storage, by its identity, belongs to a parameter or a buffer.
    """

    def __init__(self, recorder: Recorder, is_fixed: Callable[[int], bool]) -> None:
        self._recorder = recorder
        self._is_fixed = is_fixed
        self._fixed: set[int] = set()
        self._records_now = False  # whether this thread may have a record under way
        self.packs: Packs | None = None
        self._forwards = 0  # that are recorded
        self._names: dict[int, str] = {}  # of closures, by signature
        self._calls: dict[Call, weakref.ref[Replay]] = {}  # what is dropped, by the operator that made it
        self._records = 0  # so far
        self._gathering: Gathering | None = None
        self._settings = 0  # of PyTorch's, when the forward began
        self.choices = now = choices()
        self._chosen = {now: now}  # all that there were

    def forward_begins(self, gathering: Gathering | None) -> None:
        """Record a model's forward, unless nothing is to be found in it, or another thread is recorded.

        Several forwards may follow before backward, each of which may use results of others. Without end they are an
        evaluation that forgot `no_grad`, and one record of all would fill memory; and so would a validation.

        Parameters
        ----------
        gathering : Gathering or None
            The parameters that are gathered while a module computes; None if nothing is to be found.
        """
        if gathering is None or not torch.is_grad_enabled():
            self.end()
            return
        self._forwards += 1
        if self._forwards > FORWARDS:
            self.end()
        if self.packs is None:
            if self._records_now:  # an interrupt came between the next lines: nobody could record after that
                self._recorder.stop()
            self._records_now = True  # before the record begins, so that an interrupt right after that is noticed
            self._records_now = self._recorder.begin()
            if self._records_now:
                self.packs = self._recorder.packs()
        self._gathering = gathering
        if self.packs is not None and gathering.storages:
            self.packs.refilled(gathering.storages)
        now = choices()
        self._settings, self.choices = self._recorder.settings(), self._chosen.setdefault(now, now)

    def end(self) -> None:
        """Stop recording, as backward begins in some thread. Closures that were found stay valid. Idempotent."""
        self._forwards = 0
        if self._gathering is not None:
            self._gathering.changed()  # asked now: an optimizer in backward may change some before the first replay
        if self._records_now:
            self.packs = None
            self._records += 1
            self._calls.clear()
            self._recorder.stop()
            self._records_now = False

    def __del__(self) -> None:
        self.end()  # of a thread that has ended: no other could record

    def forget_dead(self) -> None:
        """Forget tensors packed in forwards that no graph holds any more."""
        if self.packs is not None:
            self.packs.forget_dead()

    def note(self, tensor: Tensor, packed: Any, key: str) -> None:
        """Remember what the graph holds for a tensor at a site, as others may be recomputed from it."""
        if self.packs is not None:
            self.packs.note(tensor, packed, key)

    def find(self, base: Tensor) -> Replay | None:
        """Return the replay of a tensor's whole storage; None if there is none."""
        packs = self.packs
        found = None if packs is None else packs.find(base, self._settings, self._is_written_by_operators_only)
        if found is None:
            return None
        name = self._names.get(found.signature) or self._name(found)
        call = self._records, found.last
        return Replay(name, found, call, self._recorder, self._settings, self.choices, self._gathering)

    def joined(self, found: Replay) -> tuple[Replay, int]:
        """Return the replay of a dropped tensor, shared with others of its operator, and the index of its result."""
        ref = self._calls.get(found.call)
        before = None if ref is None else ref()
        if before is not None and before.join(found):
            return before, len(before.names) - 1
        self._calls[found.call] = weakref.ref(found)
        return found, 0

    def _is_written_by_operators_only(self, storage: int) -> bool:
        """Return whether a storage is written by operators only, which the recorder sees.

        Other storages may be written without one, such as a NumPy array that batches are loaded into. So only
        parameters and buffers count.
        """
        if storage not in self._fixed and self._is_fixed(storage):  # which asks for all there are
            if len(self._fixed) >= MOST:
                self._fixed.clear()
            self._fixed.add(storage)
        return storage in self._fixed

    def _name(self, found: Bound) -> str:
        """Return the last operator, those before it, and the signature, which tells it from others."""
        *before, last = map(_bare, found.names)
        first = [f"{len(before) - NAMED} more", *before[-NAMED:]] if len(before) > NAMED else before
        operators = f"{last}({', '.join(first)})" if first else last
        if len(self._names) >= MOST:
            self._names.clear()
        name = self._names[found.signature] = f"{operators}#{found.signature & (1 << 64) - 1:016x}"
        return name


def run(what: Replay, peek: Peek) -> list[Tensor]:
    """Run a replay.

    Operators are recorded below autocast, which has cast their arguments already.
    """
    values = [peek(packed) for packed in what.inputs]
    if not torch.is_grad_enabled() and not _is_autocast():  # as in most backwards; to switch them off takes longer
        return what.run(values)
    with torch.no_grad(), torch._C._DisableAutocast():
        return what.run(values)
