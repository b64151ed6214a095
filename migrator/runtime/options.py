"""What the runtime is told: plain values, and what it asks the floor above for."""

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
from torch_tiers.migrator.telemetry.timeline import Timeline
from torch_tiers.migrator.telemetry.transfers import Transfer


class Advisor(Protocol):
    """Who tells the runtime how much of the links it may use."""

    def iteration_over(self, transfers: Sequence[Transfer], moved: Mapping[str, int]) -> Response:
        """Take in the copies that are over; what to do from now on.

        Called on the training thread at every end of an iteration, so it must return at once, and must not raise.

        Parameters
        ----------
        moved
            Bytes that the runtime has moved so far, by lane.
        """


@dataclass(frozen=True, slots=True)
class Options:
    """What the runtime is told.

    Attributes
    ----------
    policy : str
        A name of `migrator.policies.POLICIES`.
    hbm : callable
        The HBM budget of a device, in bytes.
    enforce : bool
        Have PyTorch's allocator refuse what exceeds the budget.
    backing : callable
        Makes the backing when the first tensor is about to move; told whether a GPU copies to and from it.
    tensors : callable
        The C++ part of the hooks; called when the first thread trains.
    strict : bool
        Whether not even the first steps take more HBM than the budget, though more is free.
    direct : callable
        Tells of a device's way to NVMe past host memory, if there is one; called after `backing`.
    refuse : callable, optional
        Ends the program when the budget is too small, where an exception is not what its user should see.
    pages : callable, optional
        The allocator to tell where iterations end, once it is under PyTorch.
    links : Links
        What plans take the lanes to give.
    advisor : Advisor, optional
        Asked at the end of every iteration; without one the links are used in full.
    recorder : callable
        The recorder of operators, if it can be had; called when the first thread trains.
    plan_cache : callable
        What earlier runs learned of programs on a device, for a target in bytes; None: nothing is kept.
    armed : callable
        Called in each thread when it begins to train.
    timeline : Timeline, optional
        Is told what happens when.
    """

    policy: str
    hbm: Callable[[torch.device], int]
    enforce: bool
    backing: Callable[[Counters, bool], Backing]
    tensors: Callable[[], HookTensors]
    strict: bool = False
    direct: Callable[[torch.device], DirectWay | None] = lambda device: None
    refuse: Callable[[TiersError], None] | None = None
    pages: Callable[[], PageAllocator | None] = lambda: None
    links: Links = PCIE_GEN5
    advisor: Advisor | None = None
    recorder: Callable[[], Recorder | None] = lambda: None
    plan_cache: Callable[[torch.device, int], PlanCache | None] = lambda device, target: None
    armed: Callable[[], None] = lambda: None
    timeline: Timeline | None = None
