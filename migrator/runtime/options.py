"""The options of the runtime: plain values, and factories for what the layer above provides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from torch_tiers.allocator.errors import TiersError
from torch_tiers.allocator.pages import PageAllocator
from torch_tiers.migrator.controller.cached_plans import PlanCache
from torch_tiers.migrator.model.links import PCIE_GEN5, Links
from torch_tiers.migrator.offload.backing import Backing
from torch_tiers.migrator.offload.direct import DirectWay
from torch_tiers.migrator.runtime.backoff import Response
from torch_tiers.migrator.saved.tensors import HookTensors
from torch_tiers.migrator.tape.recorder import Recorder
from torch_tiers.migrator.telemetry.counters import Counters
from torch_tiers.migrator.telemetry.now import Now
from torch_tiers.migrator.telemetry.timeline import Timeline
from torch_tiers.migrator.telemetry.transfers import Transfer
from torch_tiers.migrator.weights.streamer import MakeSubstitutes


class Advisor(Protocol):
    """Decides how much of the links the runtime may use."""

    def iteration_over(self, transfers: Sequence[Transfer], moved: Mapping[str, int], now: Now) -> Response:
        """Take in the copies that are over; return how the runtime is to react.

        This is called on the training thread at every end of an iteration, so it must return at once, and must not
        raise.

        Parameters
        ----------
        moved
            Bytes that the runtime has moved so far, by lane.
        now
            What the run comes to.
        """


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the runtime.

    Attributes
    ----------
    policy : str
        A name of `migrator.policies.POLICIES`.
    hbm : callable
        Returns the HBM budget of a device, in bytes.
    enforce : bool
        Whether PyTorch's allocator refuses what exceeds the budget.
    settle_budget : callable, optional
        Where the budget is a share of what an iteration needs, `hbm` returns all that is free until this is called,
        once for each device: with what an iteration needs there with everything kept, and with the most that the budget
        may be, in bytes. Returns the budget.
    backing : callable
        Makes the backing when the first tensor is about to move; receives whether a GPU copies to and from it.
    tensors : callable
        Loads the C++ part of the hooks; called when the first thread trains.
    strict : bool
        Whether not even the first steps use more HBM than the budget, though more is free.
    direct : callable
        Returns a device's path to NVMe past host memory, if there is one; called after `backing`.
    refuse : callable, optional
        Ends the program when the budget is too small, if its user should not see an exception.
    pages : callable, optional
        Returns the page allocator, which is to know where iterations end, once it is under PyTorch.
    links : Links
        The assumed bandwidths.
    advisor : Advisor, optional
        Asked at the end of every iteration; without one the links are used in full.
    recorder : callable
        Returns the recorder of operators, if there is one; called when the first thread trains.
    substitutes : callable
        Returns what has operators read copies of weights; None: all weights are to fit into HBM.
    plan_cache : callable
        Returns the plan cache of a device, for a target in bytes; None: nothing is cached.
    armed : callable
        Called in each thread when it begins to train.
    timeline : Timeline, optional
        Receives events with their times.
    below : callable
        Returns the bytes in use of each tier below HBM; called when groups leave and come.
    """

    policy: str
    hbm: Callable[[torch.device], int]
    enforce: bool
    backing: Callable[[Counters, bool], Backing]
    tensors: Callable[[], HookTensors]
    strict: bool = False
    settle_budget: Callable[[torch.device, int, int], int] | None = None
    direct: Callable[[torch.device], DirectWay | None] = lambda device: None
    refuse: Callable[[TiersError], None] | None = None
    pages: Callable[[], PageAllocator | None] = lambda: None
    links: Links = PCIE_GEN5
    advisor: Advisor | None = None
    recorder: Callable[[], Recorder | None] = lambda: None
    substitutes: Callable[[], MakeSubstitutes | None] = lambda: None
    plan_cache: Callable[[torch.device, int], PlanCache | None] = lambda device, target: None
    armed: Callable[[], None] = lambda: None
    timeline: Timeline | None = None
    below: Callable[[], Mapping[str, int]] = dict
