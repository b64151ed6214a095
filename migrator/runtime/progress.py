"""What a program has come to so far: iterations, steps and plans, for `stats.json` and the timeline."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

import torch

from torch_tiers.migrator.controller.planned import PlannedIteration
from torch_tiers.migrator.runtime.devices import Devices
from torch_tiers.migrator.runtime.steps import StepTimes
from torch_tiers.migrator.saved.mover import Mover
from torch_tiers.migrator.telemetry.counters import Counters

log = logging.getLogger("tiers")

UNHEARD = 16  # steps of all optimizers together, after which an iteration should have ended


class Progress:
    """Counts iterations and steps.

    Parameters
    ----------
    counters : Counters
        What the lanes and engines count; its iterations are counted here.
    devices : Devices
        Those that are in use.
    """

    def __init__(self, counters: Counters, devices: Devices) -> None:
        self._counters, self._devices = counters, devices
        self._times = StepTimes()
        self._rounds = 0  # steps of all optimizers together
        self._unmanaged = 0
        self._iterations_at_step = 0  # when the last step was over

    @property
    def steps(self) -> int:
        """Steps so far."""
        return self._times.count

    @property
    def iterations_per_step(self) -> float:
        """Iterations of a step so far, in the mean; several where gradients are accumulated."""
        return max(1.0, self._iterations_at_step / max(1, self.steps))

    def tell_timeline(self, what: str, **more: object) -> None:
        """Tell the timeline what happened, if there is one."""
        if self._counters.timeline is not None:
            self._counters.timeline.happened(what, **more)

    def count_iteration(self) -> None:
        """Count an iteration that is over."""
        self._counters.iterations += 1

    def note_unmanaged(self, nbytes: int) -> None:
        """Note bytes that the backward of an iteration needed, and of which no hook was told."""
        self._unmanaged = max(self._unmanaged, nbytes)

    def note_plans(self, movers: Iterable[Mover]) -> None:
        """Note the new plans that these have."""
        self._times.planned()
        self._counters.planned()
        for mover in movers if self._counters.timeline is not None else ():
            for plan, predicted in zip(mover.learner.plans, mover.learner.predictions, strict=True):
                device = str(mover.engine.compute.device)
                self.tell_timeline(f"plan by {plan.policy}", device=device, plan=str(PlannedIteration(plan, predicted)))

    def count_step(self, *, leads: bool, counts: bool) -> None:
        """Count a step of an optimizer, which may be the one that leads, if it is one of its own."""
        self._rounds += leads
        if leads and self._rounds == UNHEARD and not self._counters.iterations and self._devices.opened:
            log.warning(
                "%d steps were made, and no iteration has ended: nothing is planned. This happens if forwards run in "
                "a new thread each time, or all under checkpoints of the program's own",
                UNHEARD,
            )
        if not counts:
            return
        self._iterations_at_step = self._counters.iterations
        self._times.step(now := time.perf_counter())
        self._counters.steps, self._counters.step_s = self._times.count, self._times.lately()
        if self._counters.timeline is not None:
            self._counters.timeline.step(self.steps, now)

    def numbers(self, **more: int) -> dict[str, Any]:
        """Return the numbers for `stats.json`, and `more`; HBM's as ``budget_hbm``, ``peak_hbm``, ``beside_hbm``."""
        counters, devices = self._counters, self._devices.opened.values()
        return {
            "device": ", ".join(dict.fromkeys(_name(device) for device in self._devices.opened)),
            "budget_hbm": max((shared.budget for shared in devices), default=0),
            "peak_hbm": max((shared.compute.reserved() for shared in devices), default=0),
            "beside_hbm": max((shared.beside for shared in devices), default=0),
            "iterations": counters.iterations,
            "steps": self.steps,
            "moved": dict(counters.moved),
            "groups": counters.groups,
            "flushes": counters.flushes,
            "stalls": {cause: {"count": s.count, "seconds": s.seconds} for cause, s in counters.stalls.items()},
            "settled": counters.settled(),
            "unmanaged_bytes": self._unmanaged,
            "step_s": self._times.summary(),
            **more,
        }


def _name(device: torch.device) -> str:
    """Return the name of a device for reports."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
