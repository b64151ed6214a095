"""What makes saved tensors again from others: closures of the operators that the forward under way has run.

While a forward is recorded on the tape, each saved tensor is a value there. What makes one of them is found by walking
back from it to others that were saved, and to what no operator of this forward made, such as parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torch_tiers.migrator.engine.storages import reach
from torch_tiers.migrator.recompute.choices import Choices, choices, chosen
from torch_tiers.migrator.recompute.dropped import MODIFIED
from torch_tiers.migrator.recompute.formulas import Formula
from torch_tiers.migrator.tape.closure import Closure, Differs, Refused, Stops

if TYPE_CHECKING:
    from torch_tiers.migrator.tape.recorder import Recorder


NAMED = 6  # operators of a closure that its name tells, besides the last
FORWARDS = 64  # in one record, one after the other without a backward
MOST = 4096  # names and storages that are remembered: a program of ever new ones must not fill memory with them


class _Pack(NamedTuple):
    """What was packed of a saved tensor, without keeping that alive.

    Attributes
    ----------
    ref : weak reference
        To what was packed; of what stays to the alias.
    rest : tuple or None
        The rest of what stays, see `packed.Kept`.
    first : int
        The byte of the storage at which the tensor begins.
    key : str
        The site.
    """

    ref: weakref.ref[Any]
    rest: tuple[Any, ...] | None
    first: int
    key: str

    def get(self) -> Any:
        """What was packed; None if the graph has let go of it."""
        found = self.ref()
        return found if found is None or self.rest is None else (found, *self.rest)


class Replays:
    """The closures of one thread's forward.

    Parameters
    ----------
    recorder : Recorder
        The process's recorder of operators, which one thread at a time can have.
    is_fixed : callable
        Whether a storage, by its identity, belongs to a parameter or a buffer.
    """

    def __init__(self, recorder: Recorder, is_fixed: Callable[[int], bool]) -> None:
        self._recorder = recorder
        self._is_fixed = is_fixed
        self._fixed: set[int] = set()
        self._packs: dict[tuple[int, int], _Pack] = {}
        self._forwards = 0  # that are recorded
        self._names: dict[int, str] = {}  # of closures, by signature
        self._stops: Stops | None = None
        self._settings, self._choices = 0, choices()  # of PyTorch's, when the forward began

    def forward_begins(self, *, finds: bool) -> None:
        """A model's forward begins: record it if anything is to be found in it, unless another thread is recorded.

        Several may follow before backward, each of which may take what others made. Without end they are an evaluation
        that forgot `no_grad`, and one record of all would fill memory; and so would a validation.
        """
        if not torch.is_grad_enabled():
            self.end()
            return
        if not finds:
            return
        self._forwards += 1
        if self._forwards > FORWARDS:
            self.end()
        if self._stops is None and self._recorder.begin(states=True):
            self._stops = self._recorder.stops()
        self._settings, self._choices = self._recorder.settings(), choices()

    def end(self) -> None:
        """Record no more: backward begins, in whichever thread. Closures that were found stay good. Idempotent."""
        self._forwards = 0
        if self._stops is not None:
            self._stops = None
            self._packs.clear()
            self._recorder.stop()

    def __del__(self) -> None:
        self.end()  # of a thread that has ended: no other could record

    def note(self, tensor: Tensor, packed: Any, key: str) -> None:
        """Remember what was packed of a tensor at a site: others may be made from it."""
        if self._stops is None or _is_part(tensor):
            return
        value = self._stops.add(tensor)
        if value is None or (value in self._packs and self._packs[value].get() is not None):
            return
        kept = type(packed) is tuple
        ref = weakref.ref(packed[0] if kept else packed)
        first = int(tensor.storage_offset()) * tensor.itemsize
        self._packs[value] = _Pack(ref, packed[1:] if kept else None, first, key)

    def find(self, base: Tensor) -> tuple[Formula, frozenset[str]] | None:
        """What makes all of a tensor's storage again, and at which sites that was saved which it takes.

        None if there is nothing of that kind.
        """
        if self._stops is None or base.storage_offset() or base.nbytes != base.untyped_storage().nbytes():
            return None
        closure = self._recorder.closure([base], self._stops)
        if isinstance(closure, Refused) or closure.settings != self._settings:
            return None
        inputs, keys, own, rescued = list[Any](), list[str](), list[Tensor | None](), set[int]()
        places: list[tuple[int, int] | None] = []  # of each leaf: which input it is, and where that begins
        held = closure.leaf_tensors()
        for leaf, tensor in zip(closure.leaves, held, strict=True):
            pack = self._packs.get((leaf.storage, leaf.state))
            packed = None if pack is None else pack.get()
            lasts = tensor is not None and leaf.state < 0 and (packed is None or _stays(packed)) and self._lasts(tensor)
            if pack is None or packed is None or lasts:
                if not (lasts or leaf.is_constant):
                    return None
                if lasts and packed is None:  # else the graph has it, and changed it is an error there
                    rescued.add(len(places))
                places.append(None)
                own.append(tensor)
                continue
            places.append((len(inputs), pack.first))
            own.append(None)
            inputs.append(packed)
            keys.append(pack.key)
        closure.release()
        run = _Run(self._recorder, closure, tuple(places), tuple(own), rescued, self._choices)
        return Formula(self._name(closure), tuple(inputs), run), frozenset(keys)

    def _lasts(self, tensor: Tensor) -> bool:
        """Whether nobody writes a tensor that was not packed without an operator, which tells us before.

        On the host somebody may, such as who loads batches into an array of NumPy's: all but parameters and buffers.
        """
        if not tensor.is_cpu:
            return True
        storage = tensor.untyped_storage()._cdata
        if storage not in self._fixed and self._is_fixed(storage):  # which asks for all there are
            if len(self._fixed) >= MOST:
                self._fixed.clear()
            self._fixed.add(storage)
        return storage in self._fixed

    def _name(self, closure: Closure) -> str:
        """As formulas are named: the last operator, those before it, and the signature, which tells it from others."""
        name = self._names.get(closure.signature)
        if name is None:
            *before, last = (name.removeprefix("aten::").partition(".")[0] for name in closure.names)
            first = [f"{len(before) - NAMED} more", *before[-NAMED:]] if len(before) > NAMED else before
            operators = f"{last}({', '.join(first)})" if first else last
            if len(self._names) >= MOST:
                self._names.clear()
            name = self._names[closure.signature] = f"{operators}#{closure.signature & (1 << 64) - 1:016x}"
        return name


def _stays(packed: Any) -> bool:
    """Whether what was packed is a parameter's, or too small to move."""
    return type(packed) is tuple and packed[3] is not None and packed[3].known is None


def _is_part(tensor: Tensor) -> bool:
    """Whether, where it moves, that is not all of its storage."""
    try:
        nbytes = tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):  # it has none
        return True
    return tensor.nbytes != nbytes and reach(tensor, nbytes) != (0, nbytes)


class _Run:
    """Makes the tensor of one closure out of its unpacked inputs.

    Parameters
    ----------
    places : tuple of (int, int) or None
        For each leaf which input it is, and the byte at which that began; None if it is in `own`.
    own : tuple of Tensor or None
        Parameters and buffers, which nobody brings back.
    rescued : set of int
        Leaves of `own` of which a copy is taken before somebody writes them.
    those : Choices
        The kernels that forward was told to take.
    """

    __slots__ = ("__weakref__", "_choices", "_closure", "_own", "_places", "_recorder", "_rescued")

    def __init__(
        self,
        recorder: Recorder,
        closure: Closure,
        places: tuple[tuple[int, int] | None, ...],
        own: tuple[Tensor | None, ...],
        rescued: set[int],
        those: Choices,
    ) -> None:
        self._recorder = recorder
        self._choices = those
        self._closure = closure
        self._places = places
        self._own = own
        self._rescued = rescued
        if rescued:
            ref = weakref.ref(self)  # the closure has what it calls, and lives as long as this
            closure.watch(lambda leaf: None if (run := ref()) is None else run.rescue(leaf))

    def rescue(self, leaf: int) -> None:
        """Take a copy of a leaf that is about to be written, such as a bias, which plain PyTorch needs no more."""
        tensor = self._own[leaf]
        if leaf in self._rescued and tensor is not None:
            with self._recorder.aside():
                self._own = (*self._own[:leaf], tensor.clone(), *self._own[leaf + 1 :])

    def __call__(self, values: Sequence[Tensor]) -> Tensor:
        leaves = [
            tensor if place is None else (values[place[0]], place[1])
            for place, tensor in zip(self._places, self._own, strict=True)
        ]
        is_as_it_was = self._recorder.settings() == self._closure.settings
        with nullcontext() if is_as_it_was else chosen(self._choices):
            try:
                (made,) = self._closure.run(leaves)
            except Differs as error:
                if self._closure.is_stale:
                    raise RuntimeError(f"what a saved tensor is made from again has been {MODIFIED}.") from error
                raise Differs(
                    f"a saved tensor that was dropped to save memory cannot be made again: {error}. Leave TIERS_REPLAY "
                    "out, or choose a policy that recomputes nothing, such as TIERS_POLICY=flashneuron"
                ) from error
        return made
