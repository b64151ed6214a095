"""The room for saved tensors before there is a plan."""

from __future__ import annotations

from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.offload.engine import Engine
from torch_tiers.migrator.offload.filling import Filling
from torch_tiers.migrator.planner.sizes import has_room_to_learn, learning_room, unseen


class LearningRoom:
    """Before there is a plan everything stays on a device as long as it may fit. To be used with the engine's lock.

    For the parameters see `migrator.saved.mover.Mover`.
    """

    def __init__(self, engine: Engine, filling: Filling, budget: int, *, keeps: bool, spills: bool, lent: int) -> None:
        # The program may fit without a plan. To find that it does not does no harm where the allocator goes on in DRAM.
        patient = spills and not keeps and (lent > 0 or has_room_to_learn(engine.backing.dram_capacity, budget))
        beside = unseen(budget, engine.compute.allocated()) if patient else None
        self._engine = engine
        self._filling = filling
        self._budget = budget
        self._lent = lent if patient else 0
        self._measures = patient  # what lies beside saved tensors tells how many of these may stay
        filling.patient = patient
        filling.room = budget if keeps else learning_room(budget + self._lent, beside)

    def pays_back(self) -> bool:
        """Return whether the loan beyond the budget has become unnecessary since the last call."""
        if self._filling.patient or not self._lent:
            return False
        self._lent = 0
        return True

    def see_beside(self, trace: Trace, allocated_before: int) -> None:
        """Reduce the room by what lay in HBM besides saved tensors, and by what lives on: the optimizer's state."""
        if self._measures and trace.others:
            lives_on = self._engine.compute.allocated() - allocated_before
            lent = self._lent if self._filling.patient else 0  # else it is about to be paid back
            self._filling.room = learning_room(self._budget + lent, max(trace.others) + max(0, lives_on))

    def measures_no_more(self) -> bool:
        """Take note that there was less room than was seen; return whether anything was."""
        measured, self._measures = self._measures, False
        return measured

    def end(self) -> None:
        """Offload all tensors that no plan expects."""
        self._filling.patient = False
        self._filling.room = self._engine.hbm.limit = learning_room(self._budget)
