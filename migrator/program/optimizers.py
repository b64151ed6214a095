"""The optimizers of a program: which of them leads, and what their gradients and state take."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from torch_tiers.migrator.program import weights

LEADERLESS = 2048  # steps of others, after which one of them leads: there may be one for each parameter
FEW = 8  # optimizers, of which any may be a period's last; of more only the first few steps are looked at
_HOST = torch.device("cpu")


def all_alive() -> list[torch.optim.Optimizer]:
    """Return every optimizer that there is, also one that has not stepped yet. Looks at all objects of the program."""
    # Not isinstance: some objects do something when they are asked for their class.
    found = (each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer))
    return [each for each in found if hasattr(each, "param_groups")]  # one that is being made has none


class Stepped(NamedTuple):
    """What a step of an optimizer is to the program.

    Attributes
    ----------
    leads : bool
        Whether the optimizer leads; see `Optimizers`.
    counts : bool
        Whether it is one more step of the program. A step within another optimizer's is not, nor is one within
        backward, unless the optimizer leads: there may be one for each parameter.
    """

    leads: bool
    counts: bool


class Optimizers:
    """Every optimizer that has stepped, as long as it lives. Steps of the one that leads end the allocator's periods.

    Only that one does: else a program that trains two models in turn would have two kinds of periods.

    Attributes
    ----------
    period_due : bool
        Whether the leader has stepped since a period began. Before the first step, too, one begins.
    """

    def __init__(self) -> None:
        self.period_due = True
        self._of_thread = threading.local()  # `under_way`: those that have begun a step, the outermost first
        self._state = WeakIdKeyDictionary()  # bytes, by optimizer, which may compare as it likes
        self._leader: weakref.ref[torch.optim.Optimizer] | None = None
        self._followed = 0  # steps of others since the leader's last

    def __contains__(self, optimizer: torch.optim.Optimizer) -> bool:
        return optimizer in self._state

    @property
    def ending(self) -> bool:
        """Whether the one that has stepped may have been the period's last."""
        return self.period_due and self._followed <= FEW

    @property
    def nbytes(self) -> int:
        """Bytes of gradients and state in host memory, as far as they were counted."""
        return sum(self._state.values())

    def count(self, optimizer: torch.optim.Optimizer) -> None:
        """Count gradients and state of an optimizer, perhaps anew."""
        self._state[optimizer] = weights.bytes_on(_HOST, weights.of_optimizer(optimizer))

    def stepping(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer begins a step, perhaps within another's, as a container has others make them."""
        self._of_thread.under_way = [*self._around(optimizer), weakref.ref(optimizer)]

    def stepped(self, optimizer: torch.optim.Optimizer) -> Stepped:
        """An optimizer has made a step."""
        leader = self._leader and self._leader()
        self._followed = 0 if leader is None or leader is optimizer else self._followed + 1
        if leader is None or self._followed > LEADERLESS:
            leader, self._leader, self._followed = optimizer, weakref.ref(optimizer), 0
        leads = leader is optimizer
        self.period_due |= leads
        around = self._of_thread.under_way = self._around(optimizer)
        return Stepped(leads, not around and (leads or torch._C._current_graph_task_id() == -1))

    def _around(self, optimizer: torch.optim.Optimizer) -> list[weakref.ref[torch.optim.Optimizer]]:
        """Return those in whose steps that of this one is; what an exception has left is forgotten with its next."""
        around = list[weakref.ref[torch.optim.Optimizer]]()
        for ref in getattr(self._of_thread, "under_way", ()):
            if (other := ref()) is optimizer:
                break
            if other is not None:
                around.append(ref)
        return around
