"""What the hooks do besides while a period is recorded: find out what could be recomputed, alone or by regions."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from torch_tiers.migrator.engine.mover import Mover
from torch_tiers.migrator.hooks import weights
from torch_tiers.migrator.hooks.packed import Packed, keep
from torch_tiers.migrator.recompute.arguments import changeable
from torch_tiers.migrator.recompute.choices import Choices, choices
from torch_tiers.migrator.recompute.dropped import Dropped
from torch_tiers.migrator.recompute.finder import Took, Verified, base_of, find, layout
from torch_tiers.migrator.recompute.formulas import Formula, given_at_last
from torch_tiers.migrator.recompute.origins import Origins, Versions, note_epsilon
from torch_tiers.migrator.recompute.regions import Regions
from torch_tiers.migrator.recompute.replays import Replays
from torch_tiers.migrator.recompute.trials import Inputs, Trial
from torch_tiers.migrator.recompute.watch import Watch
from torch_tiers.migrator.recording.recorder import Recorder
from torch_tiers.migrator.timing import product_in

EPSILONS = (1e-5, 1e-6)
"""What normalisations are tried with that are no modules: neither node nor module tells."""

UNLIKE = 1e-3  # more than twice a guess: another one, which a formula must be seen to tell from it

NO_FORWARD = 1 << 64
"""No node is as late: nothing can be recomputed."""

Movable = Callable[[Tensor], bool]


class Observer:
    """Looks on for one thread's hooks.

    Parameters
    ----------
    regions : Regions
        Told of modules that could be recomputed.
    movable : callable
        Whether a tensor may move.
    unpack : callable
        The thread's own unpack hook.
    replays : Replays, optional
        What makes tensors again by the operators that made them; without it that is done by formulas.
    """

    def __init__(
        self,
        regions: Regions,
        movable: Movable,
        unpack: Callable[[Any], Tensor],
        replays: Replays | None = None,
    ) -> None:
        self._replays = replays
        self._source: Origins | None = None  # of the forward under way, where nothing but replays is asked
        self._regions = regions
        self._movable = movable
        self._unpack = unpack
        self._began = NO_FORWARD  # PyTorch's number of the first node of the forward under way
        self._choices: Choices | None = None  # the kernels that the program had chosen when it began
        self._chosen: dict[Choices, Choices] = {}  # all that there were
        self._versions: Versions = {}  # of parameters that formulas may ask for, when it began
        self._asked: set[int] = set()  # those that they did ask for so far, by id
        self._changed: set[int] = set()  # those that had changed when they did
        self._root: weakref.ref[nn.Module] | None = None
        # Of its parameters after the last step, and how many had been asked for by then.
        self._ahead: tuple[int, Versions] = -1, {}
        self._was_ahead = False  # whether the forward under way goes by that
        self._reads_ahead = True
        self._narrowed: weakref.WeakKeyDictionary[nn.Module, tuple[int, list[weakref.ref[nn.Parameter]]]] = (
            weakref.WeakKeyDictionary()
        )  # the same by root, and how many had been asked for by then
        self._parameters: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[nn.Parameter]] | None] = (
            weakref.WeakKeyDictionary()
        )  # of each root, as they were when it was recorded last; None where some are sharded

    def forward_begins(self, root: nn.Module, *, recording: bool, asks: bool = True) -> None:
        """An outermost module's forward begins; whether any formula of it asks which versions parameters have."""
        if recording or root not in self._parameters:
            # To visit all modules takes milliseconds, in which the device has nothing to do. A parameter that comes
            # later is one that no formula takes.
            self._parameters[root] = _parameters(root)
            self._narrowed.pop(root, None)
        known = self._parameters[root]
        self._began = NO_FORWARD if known is None else torch._C._autograd._get_sequence_nr()
        now = choices()
        self._choices = self._chosen.setdefault(now, now)
        self._source = None
        if self._changed and self._was_ahead:
            self._reads_ahead = False  # the program changes parameters between its steps and its forwards
        self._changed.clear()
        number, ahead = self._ahead if self._root is not None and self._root() is root else (-1, {})
        self._was_ahead = self._reads_ahead and not recording and number == len(self._asked)
        if not self._was_ahead:
            self._ahead = -1, {}
            ahead = _versions(known or [] if recording else self._of_formulas(root) if asks else [])
        self._root, self._versions = weakref.ref(root), ahead

    def stepped(self, *, all_of_it: bool) -> None:
        """An optimizer has made a step: what parameters are now they mostly are when the next forward begins.

        To read that takes a tenth of a millisecond, for which the device would wait then, and now does not. Should one
        change in between, no formula takes it in that forward. Where it is but one of several optimizers that steps,
        versions are read when the forward begins.
        """
        root = None if self._root is None else self._root()
        if root is not None and self._reads_ahead:
            self._ahead = (len(self._asked), _versions(self._of_formulas(root))) if all_of_it else (-1, {})

    def _of_formulas(self, root: nn.Module) -> list[weakref.ref[nn.Parameter]]:
        """The parameters that formulas have asked for: to read the versions of all takes half a millisecond each time.

        One that is asked for later is one more from the next forward on, and until then no formula takes it.
        """
        number, refs = self._narrowed.get(root, (-1, []))
        if number != len(self._asked):
            refs = [ref for ref in self._parameters[root] or () if id(ref()) in self._asked]
            self._narrowed[root] = len(self._asked), refs
        return refs

    def enter(self, mover: Mover, path: str, module: nn.Module, tensors: Sequence[Tensor]) -> None:
        """The forward of a module begins that others have called, with these tensors."""
        if mover.recorder is None or mover.recorder.trials is None:
            return
        if self._began == NO_FORWARD or not self._regions.know(path, module):
            return
        if any(tensor.is_inference() for tensor in tensors):
            return  # no checkpoint can save those
        tensors = [tensor for tensor in tensors if tensor.numel()]  # see `sites.Node.of_inputs`
        inputs = [mover.storages.find(tensor) if self._movable(tensor) else None for tensor in tensors]
        watch = None
        # What cannot be looked at (a property that raises, an array of objects) is left alone, whatever it says.
        with mover.recorder.aside(), suppress(Exception):
            watch = Watch(module, tensors)
        if watch is not None:  # not aside: there the region's time begins
            mover.recorder.enter(path, inputs, watch)

    def leave(
        self,
        movers: Sequence[Mover],
        path: str,
        module: nn.Module,
        args: Sequence[object],
        named: Mapping[str, object],
        output: object,
    ) -> None:
        """A forward ends that was given these arguments."""
        note_epsilon(module, output)
        recorders = [mover.recorder for mover in movers if mover.recorder is not None and mover.recorder.visits(path)]
        if recorders:
            others = changeable((*args, *named.values()))
            # Arguments by name are not known when a forward begins: of a tensor that was ever changed nobody can say
            # when.
            if any(map(_was_changed, named.values())):
                others = None
            self._regions.seen(module, repeatable=all([recorder.leave(path, others) for recorder in recorders]))

    def _find(self, base: Tensor, source: Origins) -> Formula | None:
        if self._replays is None:
            return find(base, source)
        if self._began == NO_FORWARD or (found := self._replays.find(base)) is None:
            return None
        what, keys = found
        source.found.update(keys)
        return what

    def origins(self, epsilon: float | None = None) -> Origins:
        """Where formulas find their inputs now."""
        keeper = self._unpack, keep, self._versions, self._asked, self._changed
        return Origins(*keeper, self._began, self._choices, epsilon, self._replays)

    def origins_of_drops(self, epsilon: float | None = None) -> Origins:
        """The same for what is dropped by a plan: with replays there is one for all of a forward."""
        if self._replays is None:
            return self.origins(epsilon)
        if self._source is None:
            self._source = self.origins()
        return self._source

    def prepare(self, tensor: Tensor, key: str, packed: Packed) -> None:
        """See whether the tensor could be recomputed, if this is the first of its storage."""
        record = packed[3] if isinstance(packed, tuple) else packed.record
        if record is None or record.known is None:
            return
        trials, ident, base = record.recorder.trials, record.known.ident, base_of(tensor)
        if trials is None or not trials.is_new(ident) or not self._movable(base):
            return
        for epsilon in (None, *EPSILONS):
            source = self.origins(epsilon)
            what = packed.made.formula if isinstance(packed, Dropped) else self._find(base, source)
            inputs = None if what is None else _inputs(what, record.recorder)
            if what is not None and inputs is not None:
                if trials.knows(ident, key, base, what, inputs, source):
                    return
                verified = Verified(
                    {what.name: Took(0.0, 0)},
                    source.told,
                    layout(base),
                    base._version,
                    source.searched,
                    frozenset(source.found),
                    source.choices if product_in(what.name) else None,
                )
                first, nbytes = int(tensor.storage_offset()), base.untyped_storage().nbytes()
                unlike = None if epsilon is None else find(base, self.origins(2 * epsilon + UNLIKE))
                record.trials.append(
                    Trial(ident, what, verified, inputs, base.size(), base.stride(), first, nbytes, unlike)
                )
            if epsilon is None and (what is not None or not source.asked):
                return  # it is not for want of an epsilon


def _parameters(root: nn.Module) -> list[weakref.ref[nn.Parameter]] | None:
    """A model's parameters; None if they lose their memory between the forward and the backward of their module."""
    if weights.is_sharded(root):
        return None
    return [weakref.ref(parameter) for parameter in root.parameters()]


def _versions(refs: Sequence[weakref.ref[nn.Parameter]]) -> Versions:
    return {id(parameter): (ref, parameter._version) for ref in refs if (parameter := ref()) is not None}


def _was_changed(argument: object) -> bool:
    return isinstance(argument, Tensor) and not argument.is_inference() and argument._version > 0


def _inputs(what: Formula, recorder: Recorder) -> Inputs | None:
    """The storages that a formula needs; None if one of them is not of this period."""
    idents, at_last = dict[int, None](), set(given_at_last(what.name))
    held = dict[int, None]()
    for number, packed in enumerate(what.inputs):
        record = packed[3] if isinstance(packed, tuple) else packed.record
        if record is None:
            continue  # a leaf of the graph: the program keeps it
        if record.recorder is not recorder:
            return None
        if record.known is not None:
            idents[record.known.ident] = None
            if number in at_last:
                held[record.known.ident] = None
    return Inputs(tuple(idents), tuple(held))
