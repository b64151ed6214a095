"""How the runtime backs off while others need the memory bus, in grades, and recovers afterwards. Pure.

One number, the *share*, says how much of the runtime's usual demand is left. It is halved while others saturate the
bus, and grows by an eighth a step once the bus is free (additive increase, multiplicative decrease: Chiu and Jain,
1989). The share alone determines the reaction, so the grades come in one order and go in the other:

1. below 1, groups are prefetched just in time, not as early as the room allows: fewer are under way at once;
2. at `FLOOR`, plans are made for the bandwidth that is left. A planner then recomputes or keeps what no longer hides
   behind the computation. NVMe is a way out only if drives reach HBM without the bus.

Asking for more to test whether the bus is free would oscillate under a constant load. There is no need to: each copy
that is still made shows the bandwidth of its lane. So the share grows only when the verdict is free. If that proves
wrong all the same, the next recovery waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torch_tiers.migrator.model.links import WORSE

State = Literal["free", "saturated", "recovering"]
Cause = Literal["nobody", "us", "others", "workers", "unknown"]

FLOOR = 1 / 4  # of the share, at which plans are made anew: a load that is over in a few steps is not worth it
INCREASE = 1 / 8  # a step
COOLING = 3  # steps between two decreases, in which the first can show
WARY = 20  # free steps that a recovery waits for after one that failed; after the next so many times as many
WARIEST = 100
PROVEN = 60  # steps at the full share after which a recovery has not failed
GROUPS = 16  # that may be back early at half of the share or more
LEAST_GROUPS = 8  # below that; with 4 a GPT lost 2 to 3% on an H100 and the load won nothing: the bytes are the same


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the monitor makes of its readings.

    Attributes
    ----------
    state
        ``recovering``: there is room again, but not for long enough to be called free.
    cause
        Who saturates the bus; ``unknown`` where no sensor tells whose its traffic is. ``workers``: the program's own
        keep the cores busy, and so wait for memory, whatever is left of the lanes.
    left
        Of every lane that is known of, the part of its bandwidth that is left: 1 is all.
    bus
        The same of the host's memory bus.
    """

    state: State = "free"
    cause: Cause = "nobody"
    left: Mapping[str, float] = field(default_factory=dict)
    bus: float = 1.0


@dataclass(frozen=True, slots=True)
class Response:
    """What the runtime is to do.

    Attributes
    ----------
    ahead
        Groups that may be back in HBM before backward asks for them; None: as many as there is room for.
    left
        The part of each lane, and of ``bus``, to plan with; a lane without an entry is planned with in full.
    """

    ahead: int | None = None
    left: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Backoff:
    """A state of the back-off; `step` leads to the next.

    Attributes
    ----------
    share
        See the module's text.
    left
        What plans are made with.
    cooling
        Steps until the share may be halved again.
    calm
        Free steps in a row.
    patience
        Free steps that the next increase waits for; after a recovery that failed, more.
    unproven
        Steps that the present recovery must last until it has not failed; 0 when there is none.
    """

    share: float = 1.0
    left: Mapping[str, float] = field(default_factory=dict)
    cooling: int = 0
    calm: int = 0
    patience: int = 0
    unproven: int = 0

    def step(self, verdict: Verdict) -> Backoff:
        """The state after a verdict."""
        if verdict.state == "saturated" and verdict.cause != "us":  # in doubt there is room to be made
            return self._less(verdict)
        if verdict.state == "free":
            return self._more()
        return replace(self, calm=0, cooling=max(self.cooling - 1, 0))

    def _less(self, verdict: Verdict) -> Backoff:
        patience = min(WARY * max(self.patience, 1), WARIEST) if self.unproven else self.patience
        if self.cooling:
            share, cooling = self.share, self.cooling - 1
        else:
            share, cooling = max(self.share / 2, FLOOR), COOLING - 1
        return Backoff(share, self._left(share, verdict), cooling, 0, patience)

    def _left(self, share: float, verdict: Verdict) -> Mapping[str, float]:
        if share > FLOOR:
            return {}
        now = {**verdict.left, "bus": verdict.bus}
        worse = any(self.left.get(lane, 1.0) - part > WORSE for lane, part in now.items())
        return now if worse or not self.left else self.left

    def _more(self) -> Backoff:
        calm, unproven = self.calm + 1, self.unproven
        if self.share == 1:
            unproven = max(unproven - 1, 0)
            return replace(self, cooling=0, calm=calm, patience=self.patience if unproven else 0, unproven=unproven)
        if calm <= self.patience:
            return replace(self, cooling=0, calm=calm)
        share = min(self.share + INCREASE, 1.0)
        return replace(self, share=share, left={}, cooling=0, calm=calm, unproven=PROVEN)

    @property
    def response(self) -> Response:
        """What is to be done in this state."""
        if self.share == 1:
            return Response()
        # Two grades, not one for every share: after each change memory is asked for in another order, and for some
        # steps the allocator maps pages anew.
        return Response(GROUPS if self.share >= 1 / 2 else LEAST_GROUPS, self.left)
