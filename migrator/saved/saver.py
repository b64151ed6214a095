"""PyTorch's saved-tensor hooks: the functions that autograd calls when it saves a tensor and when backward needs it.

`Saver.pack` is called for every tensor saved while the hooks are on. `Saver.unpack` is called when backward needs the
tensor. Whether a tensor stays in HBM, is offloaded or is dropped, an alias of it is held that shares its version
counter: saved-tensor hooks switch off PyTorch's own check for in-place modification, and the alias restores it.

The hooks belong to a thread, and so does a `Saver`. PyTorch passes them on to the threads that run backward.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from torch_tiers.migrator.program.sites import Modules, Node
from torch_tiers.migrator.recompute.replays import Replays
from torch_tiers.migrator.recording.record import Record
from torch_tiers.migrator.saved.actions import Action, Go, Owner, Recompute, Stay
from torch_tiers.migrator.saved.agenda import Agenda
from torch_tiers.migrator.saved.dropped import Dropped
from torch_tiers.migrator.saved.early_backwards import EarlyBackwards
from torch_tiers.migrator.saved.garbage import Allowance
from torch_tiers.migrator.saved.movable import MIN_BYTES, Movable
from torch_tiers.migrator.saved.mover import Mover
from torch_tiers.migrator.saved.movers import Movers
from torch_tiers.migrator.saved.observer import Observer
from torch_tiers.migrator.saved.packed import Look, Packed, alias_of, check, in_a_fork, keep, modified, peek
from torch_tiers.migrator.saved.stack import OnStack
from torch_tiers.migrator.saved.tensors import HookTensors
from torch_tiers.migrator.tape.recorder import Recorder

log = logging.getLogger("tiers")

LISTENS = 31
"""In one iteration of so many no module is bypassed: with 2, 4 or 8 micro-batches another one each time."""

_graph_task = torch._C._current_graph_task_id

_forks = 0  # between this process and the first; a saver of another one has neither its threads nor its locks


def _after_fork_in_child() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_after_fork_in_child)


class Saver(OnStack):
    """The saved-tensor hooks of one thread.

    Parameters
    ----------
    make_mover : callable
        Makes the mover of a device, or returns None if tensors of that device never move.
    root_begins : callable
        Called when the forward of an outermost module begins.
    iteration_over : callable
        Called when an iteration is over, before the next one begins.
    allowance : Allowance
        Receives the number of objects that the hooks will hold.
    tensors : HookTensors
        The C++ part of the hooks, which handles single tensors.
    recorder : Recorder, optional
        Records operators. Without one nothing is recomputed.
    """

    def __init__(
        self,
        make_mover: Callable[[torch.device], Mover | None],
        root_begins: Callable[[Saver, nn.Module], None],
        iteration_over: Callable[[Saver], None],
        allowance: Allowance,
        tensors: HookTensors,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__()
        self._movable = Movable(tensors)
        self.replays = None if recorder is None else Replays(recorder, self._movable.is_weight)
        self._forks = _forks
        self.modules: Modules[Action] = Modules()
        self.place = self.modules.place
        self.hooks = tensors.hooks(self, self.place, MIN_BYTES)
        self.movers = Movers(make_mover, self.place)
        self._early_backwards = EarlyBackwards(self.place, self.movers)
        self._agenda = self.place.agenda = Agenda()  # what the plans say, and what the iteration under way goes by
        self.steps_before = 0  # optimizer steps made before the iteration began
        self._root_begins = root_begins
        self._iteration_over = iteration_over
        self._allowance = allowance
        self._observer = Observer(self._movable, self.replays)

    def pop(self) -> None:
        """Switch the hooks off for good. If somebody else's hooks lie on top of them, keep every tensor from now on."""
        self.take_off()
        if self.replays is not None:
            self.replays.end()
        self._agenda = self.place.agenda = Agenda()
        self.movers.disarm()
        self._listen()
        self.place.iteration += 1  # the modules look their actions up anew

    def rest_if_idle(self) -> None:
        """Switch the hooks off if no saved tensor has to be handled. Call it between two iterations only."""
        if self.movers.armed and all(mover.idle for mover in self.movers.armed) and self.rest():
            self._allowance.hold(self, 0)

    def wake(self) -> bool:
        """Switch resting hooks on and record again, as HBM is full.

        Call this before the first forward of an iteration only.
        """
        if not self.is_free() or not any([mover.wake() for mover in self.movers.armed]):
            return False
        log.info("hbm is full: saved tensors are recorded again")
        self.resting = self.place.in_backward = False
        self.push()
        self.adopt(())
        self.place.recording = True
        self.place.iteration += 1
        return True

    def enter(self, module: nn.Module) -> None:
        """A forward begins."""
        with self.movers.between() if self.place.recording else nullcontext():
            self._enter(module)
        self._bypass_or_not()

    def _enter(self, module: nn.Module) -> None:
        if self.modules.outside and _graph_task() == -1:  # a checkpoint's recomputation is no forward of its own
            if self.paused:
                self.unpause_after_interrupt()
            for armed in self.movers.armed:  # a forward that raised, before one that saves nothing, such as validation
                armed.collect()
            if self.place.recording and self.replays is not None:
                self.replays.forget_dead()
            self.movers.forget_dead_forward()
            self._movable.forward_begins(module)
            # Before a device has a mover nothing is recorded, but will be with the first tensor that is saved.
            finds = self.place.recording or self._agenda.makes or not self.movers.by_device
            if self.replays is not None:
                gathering = self._movable.gathered.of(module, afresh=self.place.recording) if finds else None
                self.replays.forward_begins(gathering)
            self._root_begins(self, module)
        self.modules.enter(module)

    def stepped(self) -> None:
        """Take note that an optimizer has made a step."""
        if self.replays is not None:  # where hooks are bypassed backward may not have been heard of
            self.replays.end()

    def leave(self) -> None:
        """A forward ends, also by an exception."""
        self.modules.leave()
        self._bypass_or_not()

    def _bypass_or_not(self) -> None:
        place = self.place
        # What is switched within a node of the graph is as before after the node.
        if (not place.bypass and not self.bypassed) or self.paused or _graph_task() != -1:
            return
        bypass = place.bypass.get(place.here.path, False) if not place.in_backward else False
        if bypass is not None and bypass is not self.bypassed:
            self.bypass(bypass)

    def leave_all(self) -> None:
        """Take note that the thread is in no module; see `Modules.leave_all`."""
        self.modules.leave_all()
        if self.bypassed:
            self.bypass(on=False)

    def adopt(self, actions: Iterable[tuple[str, Action]]) -> None:
        """Use these actions from the next iteration on."""
        self._agenda = self.place.agenda = Agenda(actions, self._early_backwards.sites)
        self._listen()
        self._allowance.hold(self, self._agenda.objects)

    def end_iteration(self, *, stepped: bool = False) -> None:
        """End the iteration if its backward has begun. Optimizer steps call this, and the next forward's first save.

        Where hooks are bypassed the begin of backward may have gone unnoticed. Then a step of the leading optimizer
        (`stepped`) ends the iteration all the same.
        """
        if self.place.in_backward or (stepped and self.place.bypass):
            self.place.in_backward = False
            self.place.iteration += 1
            self.movers.backward_came()
            try:
                self._iteration_over(self)
            finally:  # whoever catches what it raises may go on
                self.movers.begin_iteration()
                self._listen()

    def _listen(self) -> None:
        """Choose the modules in which the hooks are bypassed in the iteration that begins.

        In one of `LISTENS` iterations none is bypassed, as a module may save a tensor that no plan expects.
        """
        listens = self.place.recording or self.place.iteration % LISTENS == 0
        self.place.bypass = {} if listens else self._agenda.bypass

    def pack(self, tensor: Tensor) -> Packed:
        """Handle a tensor that autograd saves; return what the graph holds in its place."""
        if _graph_task() != -1:
            # Saved within backward: recomputed by a checkpoint, or for a second derivative. It is used
            # at once, or soon, and the order of this iteration is being played back already.
            return keep(tensor)
        if self.place.in_backward and not self._early_backwards.goes_on():
            self.end_iteration()
        node = self.place.here
        if node.iteration != self.place.iteration:
            node.begin(self.place)
        number = node.count
        node.count = number + 1
        action = node.actions[number] if number < len(node.actions) else None
        if self.place.recording:
            self.movers.arrive()
            try:
                return self._pack_recorded(tensor, node, number, action)
            finally:
                self.movers.depart()
        _count(action)
        packed: Packed
        if action is not None and action.stays:
            alias = alias_of(tensor)
            packed = (alias, alias._version, action, None)
        else:
            packed = self._move(tensor, node, number, action)
        if number in node.noted or self.place.recording:  # with the first tensor of a device that begins
            self.note(tensor, packed, f"{node.path}:{number}")
        return packed

    def note(self, tensor: Tensor, packed: Packed, key: str) -> None:
        """Remember what the graph holds for a tensor, as others may be recomputed from it."""
        if self.replays is not None:
            self.replays.note(tensor, packed, key)

    def _pack_recorded(self, tensor: Tensor, node: Node[Action], number: int, action: Action | None) -> Packed:
        """Pack a tensor while the iteration is recorded: record it, and have a recomputation of it tried."""
        packed: Packed
        _count(action)
        key = f"{node.path}:{number}"
        if isinstance(action, Stay):
            packed = keep(tensor, action, self._record(action.mover, key, tensor))
        else:
            packed = self._move(tensor, node, number, action)
        self._observer.prepare(tensor, key, packed)
        self.note(tensor, packed, key)
        record = packed[3] if isinstance(packed, tuple) else packed.record
        if record is not None:
            record.recorder.resume()
        return packed

    def unpack(self, packed: Packed) -> Tensor:
        """Return the tensor that backward needs, in HBM and bit for bit as it was saved."""
        if self._forks != _forks:
            return in_a_fork(packed)
        if not self.place.recording:
            return self._unpack(packed)
        self.movers.arrive(outside=not self.place.in_backward)
        try:
            return self._unpack(packed)
        finally:
            self.movers.depart()

    def _unpack(self, packed: Packed) -> Tensor:
        if isinstance(packed, tuple):
            alias, version, stay, record = packed
            if alias._version != version:
                raise modified(alias, alias.dtype, alias.size(), version)
            record = _asked(record)
            if not self.place.in_backward and (stay is not None or record is not None):
                self._turn()  # while it is recorded, too: all that a program saves may be too small to move
            if record is not None:
                record.used()
            if stay is not None:
                stay.mover.engine.leave(stay.leave, stay.pace)
            return alias if record is None else record.compare(alias, Look())
        check(packed)
        if not self.place.in_backward:
            self._turn()
        record = _asked(packed.record)
        if record is not None:
            record.used()
        if packed.go is not None and packed.go.pace is not None:
            packed.go.mover.engine.leave(0, packed.go.pace)
        if isinstance(packed, Dropped):
            # Asked for a second time: what it is made from is released, too, and recomputed once for all that need it.
            return Look()(packed) if packed.made.over else packed.view(peek, count=True)
        tensor = packed.mover.restore(packed)
        return tensor if record is None else record.compare(tensor, Look())

    def _turn(self) -> None:
        if _graph_task() == -1:
            return  # somebody looks at `grad_fn._saved_*`
        self.place.in_backward = True
        if self.replays is not None:
            self.replays.end()
        for mover in self.movers.armed:
            mover.begin_backward()

    def _record(self, mover: Owner, key: str, tensor: Tensor) -> Record | None:
        if mover.recorder is None:
            return None
        known = mover.storages.find(tensor) if self._movable.may_move(tensor) else None
        return mover.recorder.save(key, known, self.place.here.kind, stays=True)

    def _move(self, tensor: Tensor, node: Node[Action], number: int, go: Action | None) -> Packed:
        mover = go.mover if go is not None else self._mover(tensor.device)
        if mover is None or mover.engine.compute.capturing():
            return keep(tensor)  # a CUDA graph replays addresses: nothing of it may move
        movable = self._movable.may_move(tensor, planned=go is not None and mover.recorder is None)
        if type(go) is Go and movable and mover.recorder is None:
            return mover.take(tensor, "", go)
        key = f"{node.path}:{number}"
        if not movable:
            return keep(tensor, None, self._record(mover, key, tensor))
        if type(go) is Recompute:
            return self.drop(tensor, go)
        return mover.take(tensor, key, go if type(go) is Go else None, node.kind)

    def drop(self, tensor: Tensor, make: Recompute) -> Packed:
        """Pack a tensor that the plan drops and recomputes; keep or move it if no recomputation is known to hold."""
        packed = make.mover.drop(tensor, make, self._observer.find, self.place.here.kind)
        if type(packed) is not Dropped:
            self._observer.met(tensor, make)
        return packed

    def _mover(self, device: torch.device) -> Mover | None:
        if device not in self.movers.by_device:
            self.movers.add(device)
            self._listen()
        return self.movers.by_device[device]


def _count(action: Action | None) -> None:
    """Tell the engine that a tensor was saved for which the plan has this action."""
    if action is not None:
        action.mover.engine.enter(action.enter if action.stays else 0, action.pace)


def _asked(record: Record | None) -> Record | None:
    """Return the record of a tensor that backward asks for; None if the program reads `grad_fn._saved_*` instead."""
    return None if record is None or _graph_task() == -1 else record
