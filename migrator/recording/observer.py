"""What the hooks do besides while a period is recorded: find out what could be recomputed, alone or by regions."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from torch import Tensor, nn

from torch_tiers.migrator.engine.mover import Mover
from torch_tiers.migrator.hooks import weights
from torch_tiers.migrator.hooks.packed import Packed
from torch_tiers.migrator.recompute.arguments import changeable
from torch_tiers.migrator.recompute.dropped import Dropped
from torch_tiers.migrator.recompute.regions import Regions
from torch_tiers.migrator.recompute.replays import Replay, Replays
from torch_tiers.migrator.recompute.trials import Trial
from torch_tiers.migrator.recompute.verified import Took, Verified, base_of, layout
from torch_tiers.migrator.recompute.watch import Watch
from torch_tiers.migrator.recording.recorder import Recorder

Movable = Callable[[Tensor], bool]


class Observer:
    """Looks on for one thread's hooks.

    Parameters
    ----------
    regions : Regions
        Told of modules that could be recomputed.
    movable : callable
        Whether a tensor may move.
    replays : Replays, optional
        What makes tensors again; without it none is.
    """

    def __init__(self, regions: Regions, movable: Movable, replays: Replays | None = None) -> None:
        self.replays = replays
        self._regions = regions
        self._movable = movable
        self._sharded: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        self._may_recompute = False  # anything of the forward under way

    def forward_begins(self, root: nn.Module, *, recording: bool) -> None:
        """An outermost module's forward begins."""
        if recording or root not in self._sharded:
            # To visit all modules takes milliseconds, in which the device has nothing to do.
            self._sharded[root] = weights.is_sharded(root)
        # Sharded parameters lose their memory between the forward and the backward of their module.
        self._may_recompute = not self._sharded[root]

    def enter(self, mover: Mover, path: str, module: nn.Module, tensors: Sequence[Tensor]) -> None:
        """The forward of a module begins that others have called, with these tensors."""
        if mover.recorder is None or mover.recorder.trials is None:
            return
        if not self._may_recompute or not self._regions.know(path, module):
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
    ) -> None:
        """A forward ends that was given these arguments."""
        recorders = [mover.recorder for mover in movers if mover.recorder is not None and mover.recorder.visits(path)]
        if recorders:
            others = changeable((*args, *named.values()))
            # Arguments by name are not known when a forward begins: of a tensor that was ever changed nobody can say
            # when.
            if any(map(_was_changed, named.values())):
                others = None
            self._regions.seen(module, repeatable=all([recorder.leave(path, others) for recorder in recorders]))

    def find(self, verified: Verified, base: Tensor) -> Replay | None:
        """What makes a tensor again that a plan drops, as far as it was `verified`; None if nothing does now."""
        return verified.find(base, self.replays) if self._may_recompute and self.replays is not None else None

    def prepare(self, tensor: Tensor, key: str, packed: Packed) -> None:
        """See whether the tensor could be recomputed, if this is the first of its storage."""
        record = packed[3] if isinstance(packed, tuple) else packed.record
        if record is None or record.known is None:
            return
        trials, ident, base = record.recorder.trials, record.known.ident, base_of(tensor)
        if trials is None or not trials.is_new(ident) or not self._movable(base):
            return
        what = packed.made.replay if isinstance(packed, Dropped) else self._find(base)
        inputs = None if what is None else _inputs(what, record.recorder)
        if what is None or inputs is None or self.replays is None:
            return
        if trials.knows(ident, key, base, what, inputs, self.replays.choices):
            return
        took = {what.name: Took(0.0, 0)}
        verified = Verified(took, layout(base), base._version, frozenset(what.keys), self.replays.choices)
        first, nbytes = int(tensor.storage_offset()), base.untyped_storage().nbytes()
        record.trials.append(Trial(ident, what, verified, inputs, base.size(), base.stride(), first, nbytes))

    def _find(self, base: Tensor) -> Replay | None:
        return self.replays.find(base) if self._may_recompute and self.replays is not None else None


def _was_changed(argument: object) -> bool:
    return isinstance(argument, Tensor) and not argument.is_inference() and argument._version > 0


def _inputs(what: Replay, recorder: Recorder) -> tuple[int, ...] | None:
    """The storages that a replay begins with; None if one of them is not of this period."""
    idents = dict[int, None]()
    for packed in what.inputs:
        record = packed[3] if isinstance(packed, tuple) else packed.record
        if record is None:
            continue  # a leaf of the graph: the program keeps it
        if record.recorder is not recorder:
            return None
        if record.known is not None:
            idents[record.known.ident] = None
    return tuple(idents)
