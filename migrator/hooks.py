"""Where PyTorch hands over what it saves for backward, and asks for it back.

PyTorch calls `Saver.pack` for every tensor saved while the hooks are on, and `Saver.unpack` when
backward needs it. What stays is packed as a tuple, which costs least; what moves as a `Moved`, whose
death is noticed. Both hold an alias of the tensor that shares its version counter: saved-tensor hooks
switch off PyTorch's own check for in-place modification, and the alias puts it back, for tensors that
stay, move, or have long left HBM.

The hooks belong to a thread (PyTorch hands them on to the threads of backward), and so does a `Saver`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from migrator import weights
from migrator.actions import Action, Go, Make, Stay
from migrator.engine import Group, Saved
from migrator.formulas import Formula
from migrator.recorder import Record, Recorder
from migrator.regions import Regions, other_state
from migrator.remake import Dropped, Origins, Verified, base_of, find, layout, note, note_epsilon
from migrator.sites import Modules
from migrator.trials import Trial

if TYPE_CHECKING:
    from migrator.mover import Mover

MIN_BYTES = 4096
"""Storages smaller than this stay: to look after one costs more than its memory is worth."""

EPSILONS = (1e-5, 1e-6)
"""What normalisations are tried with that are no modules: neither node nor module tells."""

NO_FORWARD = 1 << 64
"""No node is as late: nothing can be made again."""

_graph_task = torch._C._current_graph_task_id
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_keys = torch._C._dispatch_keys


class Moved:
    """What the graph holds in place of a saved tensor that moves."""

    __slots__ = (
        "__weakref__",
        "dead",
        "dtype",
        "first",
        "go",
        "mover",
        "record",
        "saved",
        "size",
        "stride",
        "was_used",
    )

    def __init__(self, tensor: Tensor, mover: Mover, saved: Saved, go: Go | None, record: Record | None):
        self.mover = mover
        self.go = go
        self.saved = saved
        self.record = record
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.first = int(tensor.storage_offset())  # in elements
        self.was_used = False
        self.dead: deque[tuple[Group, bool]] = mover.engine.dead

    def __del__(self) -> None:
        # May run anywhere, in any thread that holds the interpreter: append is all it does.
        self.dead.append((self.saved.group, self.was_used))


Kept = tuple[Tensor, int, Stay | None, Record | None]
"""What the graph holds for one that stays: alias, version, what the plan says, and its record."""

Packed: TypeAlias = Kept | Moved | Dropped


class Saver:
    """The saved-tensor hooks of one thread.

    Parameters
    ----------
    make_mover : callable
        Makes the mover of a device, or returns None where nothing moves.
    root_begins : callable
        Called when an outermost module's forward begins.
    period_over : callable
        Called when a period is over, before the next one begins.
    """

    def __init__(
        self,
        make_mover: Callable[[torch.device], Mover | None],
        root_begins: Callable[[nn.Module], None],
        period_over: Callable[[Saver], None],
    ) -> None:
        self.modules: Modules[Action] = Modules()
        self.movers: dict[torch.device, Mover | None] = {}
        self.actions: dict[str, list[Action | None]] = {}
        self.recording = False
        self.regions = Regions(self.modules, self._may_recompute)
        self._whole: tuple[str, ...] = ()  # paths of the regions that the plans recompute
        self._ident = threading.get_ident()
        self._searching = False  # some formula of the plans needs to know which node made what was saved
        self.in_backward = False  # backward has asked for something in this period
        self.steps_before = 0  # optimizer steps made before the period began
        self._period = 0
        self._suspended = False
        self._make_mover = make_mover
        self._root_begins = root_begins
        self._period_over = period_over
        self._fixed: set[int] = set()
        self._began = NO_FORWARD  # PyTorch's number of the first node of the forward under way
        self._versions: dict[int, int] = {}  # of parameters, when it began

    # ----------------------------------------------------------------------------------- on, off

    @property
    def armed_movers(self) -> list[Mover]:
        """The movers of the devices on which anything was saved."""
        return [mover for mover in self.movers.values() if mover is not None]

    def push(self) -> None:
        """Switch the hooks on for this thread."""
        torch._C._autograd._push_saved_tensors_default_hooks(self.pack, self.unpack)

    def pop(self) -> None:
        """Switch them off; where somebody else's hooks lie on top of them, from now on everything stays."""
        if self.on_top():
            torch._C._autograd._pop_saved_tensors_default_hooks()
        self.actions = {}
        self.movers = {}
        self.regions.apply(())
        self._period += 1  # the modules look their actions up anew
        self._make_mover = lambda device: None

    def suspend(self) -> None:
        """Switch them off until `resume`."""
        torch._C._autograd._pop_saved_tensors_default_hooks()
        self._suspended = True

    def resume(self) -> None:
        """Switch them on again if they were suspended."""
        if self._suspended:
            self._suspended = False
            self.push()

    def on_top(self) -> bool:
        """Whether these are the hooks that PyTorch would call now."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return top is not None and getattr(top[0], "__self__", None) is self

    def enter(self, module: nn.Module, args: Sequence[object]) -> None:
        """A forward begins."""
        if self.modules.outside and _graph_task() == -1:  # a checkpoint's recomputation is no forward of its own
            self._forget_dead_forward()
            # Afresh for every outermost forward: `.data` swaps and sharding replace storages.
            self._fixed = weights.storages(weights.of_module(module))
            if self.recording or self._searching:
                # Sharded parameters lose their memory between the forward and the backward of their module.
                sharded = any(weights.is_sharded(child) for child in module.modules())
                self._began = NO_FORWARD if sharded else torch._C._autograd._get_sequence_nr()
                self._versions = {id(parameter): parameter._version for parameter in module.parameters()}
            self._root_begins(module)
        self.modules.enter(module)
        if self.recording and module._modules and self.modules.inside:
            self._visit(module, args)

    def leave(self, module: nn.Module, output: object) -> None:
        """A forward ends."""
        if self.recording:
            note_epsilon(module, output)
            path = self.modules.here.path
            for mover in self.armed_movers:
                if mover.recorder is not None and mover.recorder.visits(path):
                    mover.recorder.leave(path, other_state(module))
        self.modules.leave()

    def _visit(self, module: nn.Module, args: Sequence[object]) -> None:
        """Record a forward within another that could be recomputed as a whole."""
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        mover = self.movers.get(tensors[0].device) if tensors else None
        if mover is None or mover.recorder is None or not torch.is_grad_enabled() or self._began == NO_FORWARD:
            return
        path = self.modules.here.path
        if self._may_recompute() and _graph_task() == -1 and self.regions.know(path, module):
            storages = [self._movable(tensor) for tensor in tensors]
            inputs = [
                None if storage is None else mover.storages.find(tensor, storage, tensor._version)
                for tensor, storage in zip(tensors, storages, strict=True)
            ]
            mover.recorder.enter(path, inputs, other_state(module))

    def _may_recompute(self) -> bool:
        """Whether the thread is ours, and what it saves comes here: not to a checkpoint of the program's own.

        Nor to `torch.func`, nor into a CUDA graph.
        """
        autograd: Any = torch._C._autograd
        if threading.get_ident() != self._ident or not autograd._saved_tensors_hooks_is_enabled():
            return False
        if not self.on_top():
            return False
        return not any(mover.engine.compute.capturing() for mover in self.armed_movers)

    def adopt(self, actions: Iterable[tuple[str, Action]], regions: Iterable[str] = ()) -> None:
        """From the next period on, do this at these sites, and recompute these regions."""
        by_path: dict[str, dict[int, Action]] = {}
        for key, action in actions:
            path, _, number = key.rpartition(":")
            by_path.setdefault(path, {})[int(number)] = action
        self.actions = {path: [of.get(n) for n in range(max(of) + 1)] for path, of in by_path.items()}
        planned = [action for of in self.actions.values() for action in of]
        self._whole = tuple(regions)
        self._searching = any(isinstance(action, Make) and action.verified.searched for action in planned)

    def _forget_dead_forward(self) -> None:
        """Start the period over if all that it saved is dead: a forward that raised, or was only looked at.

        Only while recording. Then everything moves, so what is dead is known; and only then does it matter:
        a trace with sites that do not come again makes plans that wait for them.
        """
        for mover in self.armed_movers:
            if mover.recorder is not None and not self.in_backward and mover.forward_is_dead():
                mover.begin_again()
                self._period += 1

    def end_period(self) -> None:
        """End the period, if backward has begun in it; optimizer steps and the next forward do."""
        if self.in_backward:
            self.in_backward = False
            self._period += 1
            self._period_over(self)
            self.recording = any(mover.recorder is not None for mover in self.armed_movers)
            # A period is recorded with all that its modules save.
            self.regions.apply(() if self.recording else self._whole)

    # ------------------------------------------------------------------------------------- hooks

    def pack(self, tensor: Tensor) -> Packed:
        """PyTorch saves `tensor`."""
        if _graph_task() != -1:
            # Saved within backward: recomputed by a checkpoint, or for a second derivative. It is used
            # at once, or soon, and the order of this period is being played back already.
            return _keep(tensor, None, None)
        if self.in_backward:
            self.end_period()
        node = self.modules.here
        if node.period != self._period:
            node.period = self._period
            node.count = 0
            node.actions = self.actions.get(node.path, ())
        number = node.count
        node.count = number + 1
        action = node.actions[number] if number < len(node.actions) else None
        if action is not None and action.pace is not None:
            action.mover.engine.born(action.pace)
        if self.recording or self._searching:
            return self._pack_noting(tensor, f"{node.path}:{number}", action)
        if action is not None and action.stays:
            if action.enter:
                action.mover.engine.entered(action.enter)
            alias = tensor.detach()
            return (alias, alias._version, action, None)
        return self._move(tensor, f"{node.path}:{number}", action)

    def _pack_noting(self, tensor: Tensor, key: str, action: Action | None) -> Packed:
        """Pack as ever, and remember with the node that made the tensor what became of it; try its formula."""
        packed: Packed
        if isinstance(action, Stay):
            if action.enter:
                action.mover.engine.entered(action.enter)
            packed = _keep(tensor, action, self._record(action.mover, key, tensor))
        else:
            packed = self._move(tensor, key, action)
        if self.recording:
            self._prepare_trial(tensor, key, packed)
        note(tensor, packed)
        return packed

    def unpack(self, packed: Packed) -> Tensor:
        """Backward needs a tensor that `pack` was given."""
        if isinstance(packed, tuple):
            alias, version, stay, record = packed
            if alias._version != version:
                raise _modified(alias, alias.dtype, alias.size(), version)
            if record is not None:
                record.used()
                self._try(record, alias)
            if stay is not None:
                if not self.in_backward:
                    self._turn()
                if stay.pace is not None:
                    stay.mover.engine.reached(stay.pace)
                if stay.leave:
                    stay.mover.engine.left(stay.leave)
            return alias
        _check(packed)
        if not self.in_backward:
            self._turn()
        if packed.record is not None:
            packed.record.used()
        if packed.go is not None and packed.go.pace is not None:
            packed.go.mover.engine.reached(packed.go.pace)
        if isinstance(packed, Moved):
            tensor = packed.mover.give_back(packed)
            return tensor if packed.record is None else self._try(packed.record, tensor)
        return packed.again(self._peek, count=True)

    def _peek(self, packed: Packed) -> Tensor:
        """What `unpack` returns; but nobody has asked for it, it is needed to make another."""
        if isinstance(packed, tuple):
            alias, version, _, _ = packed
            if alias._version != version:
                raise _modified(alias, alias.dtype, alias.size(), version)
            return alias
        _check(packed)
        if isinstance(packed, Moved):
            return packed.mover.give_back(packed, count=False)
        return packed.again(self._peek, count=False)

    def _turn(self) -> None:
        if _graph_task() == -1:
            return  # somebody looks at `grad_fn._saved_*`
        self.in_backward = True
        for mover in self.armed_movers:
            mover.begin_backward()

    # --------------------------------------------------------------------------------- deciding

    def _record(self, mover: Mover, key: str, tensor: Tensor) -> Record | None:
        if mover.recorder is None:
            return None
        storage = self._movable(tensor)
        known = None if storage is None else mover.storages.find(tensor, storage, tensor._version)
        return mover.recorder.save(key, known, self.modules.here.kind)

    def _move(self, tensor: Tensor, key: str, go: Action | None) -> Packed:
        mover = go.mover if go is not None else self._mover(tensor.device)
        if mover is None or mover.engine.compute.capturing():
            return _keep(tensor, None, None)  # a CUDA graph replays addresses: nothing of it may move
        storage = self._movable(tensor)
        if storage is None:
            return _keep(tensor, None, self._record(mover, key, tensor))
        kind = self.modules.here.kind
        if type(go) is Make:
            return mover.drop(tensor, storage, key, go, self._origins(go.verified.epsilon), kind)
        return mover.take(tensor, storage, key, go if type(go) is Go else None, kind)

    def _origins(self, epsilon: float | None = None) -> Origins:
        return Origins(self._is_ours, _keep_leaf, self._versions, self._began, epsilon)

    def _is_ours(self, hook: object) -> bool:
        return getattr(hook, "__self__", None) is self

    def _prepare_trial(self, tensor: Tensor, key: str, packed: Packed) -> None:
        """See whether the tensor could be made again, if this is the first of its storage."""
        record = packed[3] if isinstance(packed, tuple) else packed.record
        if record is None or record.known is None:
            return
        trials, ident, base = record.recorder.trials, record.known.ident, base_of(tensor)
        if trials is None or not trials.is_new(ident) or self._movable(base) is None:
            return
        for epsilon in (None, *EPSILONS):
            source = self._origins(epsilon)
            what = packed.made.formula if isinstance(packed, Dropped) else find(base, source)
            inputs = None if what is None else _inputs(what, record.recorder)
            if what is not None and inputs is not None:
                if trials.knows(ident, key, base, what, inputs):
                    return
                verified = Verified(what.name, source.told, layout(base), source.searched, 0.0)
                first, nbytes = int(tensor.storage_offset()), base.untyped_storage().nbytes()
                record.trials.append(Trial(ident, what, verified, inputs, base.size(), base.stride(), first, nbytes))
            if epsilon is None and (what is not None or not source.asked):
                return  # it is not for want of an epsilon

    def _try(self, record: Record, tensor: Tensor) -> Tensor:
        """Carry the trials of a tensor out that backward is about to be given."""
        trials, record.trials = record.trials, []
        for trial in trials:
            if record.recorder.trials is not None:
                record.recorder.trials.attempt(trial, tensor, self._peek)
        return tensor

    def _mover(self, device: torch.device) -> Mover | None:
        if device not in self.movers:
            mover = self.movers[device] = self._make_mover(device)
            self.recording |= mover is not None and mover.recorder is not None
        return self.movers[device]

    def _movable(self, tensor: Tensor) -> torch.UntypedStorage | None:
        """The tensor's storage if it may move: memory of its own that is no parameter's and no buffer's."""
        if type(tensor) is not Tensor or (_keys(tensor).raw_repr() not in _plain and not _is_plain(tensor)):
            return None
        if not tensor.numel():
            return None
        storage = tensor.untyped_storage()
        if storage.nbytes() < MIN_BYTES or storage._cdata in self._fixed or type(tensor._base) is nn.Parameter:
            return None
        return storage


_plain: set[int] = set()


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is nothing but strided memory. All of it shows in the dispatch keys, so one look is enough."""
    if tensor.layout is not torch.strided or _is_wrapped(tensor) or tensor.is_nested:
        return False
    if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
        return False
    _plain.add(_keys(tensor).raw_repr())
    return True


def _inputs(what: Formula, recorder: Recorder) -> tuple[int, ...] | None:
    """The storages that a formula needs; None if one of them is not of this period."""
    idents: dict[int, None] = {}
    for packed in what.inputs:
        record = packed[3] if isinstance(packed, tuple) else packed.record
        if record is None:
            continue  # a leaf of the graph: the program keeps it
        if record.recorder is not recorder:
            return None
        if record.known is not None:
            idents[record.known.ident] = None
    return tuple(idents)


def _keep_leaf(tensor: Tensor) -> Kept:
    return _keep(tensor, None, None)


def _keep(tensor: Tensor, stay: Stay | None, record: Record | None) -> Kept:
    alias = tensor.detach()  # not the tensor: for an output that would be a reference cycle
    return (alias, alias._version, stay, record)


def _check(packed: Moved | Dropped) -> None:
    source = packed.saved if isinstance(packed, Moved) else packed.made
    if source.alias._version != source.version:
        raise _modified(source.alias, packed.dtype, packed.size, source.version)


def _modified(alias: Tensor, dtype: torch.dtype, size: torch.Size, version: int) -> RuntimeError:
    """PyTorch's own error for a saved tensor that was changed before backward used it."""
    kind = torch.empty(0, dtype=dtype, device=alias.device).type()  # the alias may be empty, and of another type
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{kind} {list(size)}] is at version {alias._version}; expected version {version} instead. "
        "Hint: enable anomaly detection to find the operation that failed to compute its gradient, "
        "with torch.autograd.set_detect_anomaly(True)."
    )
