"""Decides whether an iteration is over once a tensor is saved after a backward has begun.

It is over in most programs: between the begin of a backward and the next forward they save nothing. Some call small
backwards on the way: a loss computed in chunks, each with a backward to the detached output of the model, whose own
backward comes last; auxiliary losses of single layers. What the forward has saved still waits then. To end the
iteration would part that from its uses, and a plan for it would bring nothing back in time.
"""

from __future__ import annotations

from torch_tiers.migrator.program.sites import Place
from torch_tiers.migrator.saved.actions import Action
from torch_tiers.migrator.saved.movers import Movers


class EarlyBackwards:
    """The backwards of one thread that end no iteration.

    Such a backward leaves most of what waited for one: saved tensors that a graph holds and nobody has asked for. If
    the forward begins anew, as that of the next micro-batch, the iteration is over in any case.

    That is counted while an iteration is recorded. Others go by what was seen then: by the site that was saved next.

    Attributes
    ----------
    sites : set of str
        The sites that were saved next after such a backward.
    """

    def __init__(self, place: Place[Action], movers: Movers) -> None:
        self.sites: set[str] = set()
        self._place = place
        self._movers = movers

    def goes_on(self) -> bool:
        """Return whether the iteration goes on with the tensor that is saved now, though a backward has begun in it."""
        place = self._place
        node = place.here
        site = f"{node.path}:{node.count if node.iteration == place.iteration else 0}"
        if place.recording:
            (self.sites.add if self._movers.was_early(node.path) else self.sites.discard)(site)
        if site not in self.sites:
            return False
        place.in_backward = False
        return True
