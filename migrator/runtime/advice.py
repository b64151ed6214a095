"""Reports each iteration's copies to the monitor, and returns its advice."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from torch_tiers.allocator.pages import PageAllocator
from torch_tiers.migrator.model.links import Links
from torch_tiers.migrator.runtime.devices import Devices
from torch_tiers.migrator.runtime.options import Advisor
from torch_tiers.migrator.saved.mover import Mover
from torch_tiers.migrator.streams import Compute, Event
from torch_tiers.migrator.telemetry.counters import Counters
from torch_tiers.migrator.telemetry.now import Now
from torch_tiers.migrator.telemetry.transfers import Transfer


class Advice:
    """Asks the lanes what they copied, and the advisor how to react.

    Parameters
    ----------
    advisor : Advisor or None
        Without one the lanes are not asked: asking has more of their copies timed. May be replaced at any time.
    links : Links
        The assumed bandwidths.
    pages : callable
        Returns the page allocator, once it is under PyTorch.
    """

    def __init__(
        self,
        advisor: Advisor | None,
        links: Links,
        pages: Callable[[], PageAllocator | None],
        devices: Devices,
        counters: Counters,
    ) -> None:
        self.advisor = advisor
        self._links = links
        self._pages = pages
        self._devices = devices
        self._counters = counters
        # When the lanes were last asked, on the compute stream and by the host's clock.
        self._asked: dict[torch.device, tuple[Event, float]] = {}
        self._predicted: tuple[float | None, float | None] = None, None  # seconds with everything kept, and by the plan

    def forget(self) -> None:
        """Ignore the copies since the lanes were last asked."""
        self._asked.clear()

    def iteration_passed(self) -> None:
        """An iteration is over of which the hooks saw nothing."""
        if self.advisor is not None:
            self.advisor.iteration_over([], dict(self._counters.moved), self._now())

    def iteration_over(self, movers: Sequence[Mover]) -> tuple[int | None, Links] | None:
        """A thread's iteration is over; how many groups may be back early from now on, and the links to plan with."""
        if self.advisor is None:
            return None
        transfers = [copy for mover in movers for copy in self._copied(mover.engine.compute)]
        self._note_prediction(movers)
        response = self.advisor.iteration_over(transfers, dict(self._counters.moved), self._now())
        links = next((self._devices.opened[mover.engine.compute.device].links for mover in movers), self._links)
        return response.ahead, links.reduced(response.left)

    def _note_prediction(self, movers: Sequence[Mover]) -> None:
        """Note what is predicted of an iteration, if all are of one kind, and nothing lies in DRAM but weights."""
        learner = next((mover.learner for mover in movers if mover.learner.plans), None)
        predictions = () if learner is None or learner.varies else learner.predictions
        only = predictions[0] if len(predictions) == 1 else None
        is_known = only is not None and only.ideal and only.is_sure_of_ideal
        is_known = is_known and not ((pages := self._pages()) and pages.uses_dram)
        self._predicted = (only.ideal, only.seconds) if only is not None and is_known else (None, None)

    def _now(self) -> Now:
        counters = self._counters
        logs = [shared.log for shared in self._devices.opened.values() if shared.log is not None]
        hbm, budget = max(((log.peak, log.budget) for log in logs), default=(0, 0))
        return Now(hbm, budget, counters.steps, counters.iterations, counters.step_s, *self._predicted)

    def _copied(self, compute: Compute) -> list[Transfer]:
        """Return the copies of a device's lanes since they were last asked, if they say anything about the lanes."""
        if compute.capturing():  # events must not be asked for then
            return []
        transfers: list[Transfer] = []
        pages, shared, before = self._pages(), self._devices.opened[compute.device], self._asked.get(compute.device)
        if before is not None:
            asked, recorded = before
            if not asked.query():  # the program runs more than an iteration ahead of the device
                return []
            over = shared.out.over(asked) + shared.back.over(asked)
            if (timeline := self._counters.timeline) is not None:
                timeline.copies(str(compute.device), over, since=compute.when(asked, recorded))
            if pages is None or not pages.spilled(compute.device):  # else kernels take a part of the link
                transfers = over
        now = time.perf_counter()
        self._asked[compute.device] = compute.mark(compute.stream()), now
        return transfers
