"""Finds out which saved tensors could be recomputed: while an iteration is recorded, and of new shapes later on."""

from __future__ import annotations

from torch import Tensor

from torch_tiers.migrator.recompute.replays import Replay, Replays
from torch_tiers.migrator.recompute.trials import Trial
from torch_tiers.migrator.recompute.verified import Took, Verified, base_of, layout
from torch_tiers.migrator.recording.record import Recording
from torch_tiers.migrator.saved.actions import Recompute
from torch_tiers.migrator.saved.dropped import Dropped, Recomputed
from torch_tiers.migrator.saved.movable import Movable
from torch_tiers.migrator.saved.packed import Look, Packed
from torch_tiers.migrator.saved.parts import is_of_a_buffer


class Observer:
    """Prepares trial recomputations for the hooks of one thread.

    Parameters
    ----------
    movable : Movable
        Tells which tensors may move.
    replays : Replays, optional
        Finds how tensors are recomputed. Without it nothing is.
    """

    def __init__(self, movable: Movable, replays: Replays | None = None) -> None:
        self.replays = replays
        self._movable = movable

    def find(self, verified: Verified, base: Tensor) -> tuple[Replay, int] | None:
        """Return the replay that recomputes a tensor, if it is as it was when that was `verified`; else None."""
        return None if self.replays is None else verified.find(base, self.replays)

    def met(self, tensor: Tensor, make: Recompute) -> None:
        """Try a tensor that was to be dropped, and was not: if that is as its shape has not been tried."""
        mover, key = make.mover, make.key
        if self.replays is None or mover.recorder is not None or key in mover.checks.refused:
            return
        base, verified = base_of(tensor), mover.verified.get(key, make.verified)
        what = verified.untried(base, self.replays)
        if what is not None and not mover.engine.compute.capturing():
            made = Recomputed(base, what, 0, mover.engine)
            mover.checks.try_shape(key, base, made, verified, Look)

    def prepare(self, tensor: Tensor, key: str, packed: Packed) -> None:
        """Prepare a trial recomputation of the tensor's storage, if this is its first tensor."""
        record = packed[3] if isinstance(packed, tuple) else packed.record
        if record is None or record.known is None:
            return
        trials, ident, base = record.recorder.trials, record.known.ident, base_of(tensor)
        if trials is not None and is_of_a_buffer(tensor, base.nbytes):
            trials.leave_out(ident)  # no counter tells whether it has been written since other parts of it were saved
        if trials is None or not trials.is_new(ident, key) or not self._movable.may_move(base):
            return
        dropped = packed.made if isinstance(packed, Dropped) else None
        what, index = (self._find(base), 0) if dropped is None else (dropped.replay, dropped.index)
        inputs = None if what is None else _inputs(what, record.recorder)
        if what is None or inputs is None or self.replays is None:
            return
        if trials.knows(ident, key, base, what, index, inputs, self.replays.choices):
            return
        took = {what.names[index]: Took(0.0, 0)}
        verified = Verified(took, layout(base), base._version, frozenset(what.keys), self.replays.choices)
        first, nbytes = int(tensor.storage_offset()), base.untyped_storage().nbytes()
        record.trials.append(Trial(ident, what, index, verified, inputs, base.size(), base.stride(), first, nbytes))

    def _find(self, base: Tensor) -> Replay | None:
        return None if self.replays is None else self.replays.find(base)


def _inputs(what: Replay, recorder: Recording) -> tuple[int, ...] | None:
    """Return the storages that a replay begins with; None if one of them is not of this iteration."""
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
