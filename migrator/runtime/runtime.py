"""The runtime: switches the hooks on, and detects when iterations and steps end.

It starts late. Installing it only wraps the calls of modules and registers optimizer hooks. The first forward that
could train switches the saved-tensor hooks on, for its thread. The first tensor saved on a device makes that device's
engine. So DataLoader workers, compile workers and launchers, which import PyTorch under the same environment, never
start anything, and no CUDA context is made before the program makes it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import closing, nullcontext
from typing import Any, NoReturn

import torch
from torch import nn

from torch_tiers.allocator.errors import TiersError
from torch_tiers.allocator.overflow import FITS
from torch_tiers.allocator.pages import PageAllocator
from torch_tiers.migrator.controller.learned import Learned
from torch_tiers.migrator.model.plan import NoPlanFits
from torch_tiers.migrator.program import weights
from torch_tiers.migrator.program.optimizers import Optimizers
from torch_tiers.migrator.runtime import entry
from torch_tiers.migrator.runtime.advice import Advice
from torch_tiers.migrator.runtime.device_relief import Reliefs
from torch_tiers.migrator.runtime.devices import Devices, has_tiers
from torch_tiers.migrator.runtime.host_timer import HostTimer
from torch_tiers.migrator.runtime.models import BudgetTooSmall, Models
from torch_tiers.migrator.runtime.nvme_placement import NvmePlacement
from torch_tiers.migrator.runtime.options import Advisor, Options
from torch_tiers.migrator.runtime.placed_state import FIRST_STEPS, PlacedState
from torch_tiers.migrator.runtime.progress import Progress
from torch_tiers.migrator.runtime.savers import Savers, make_way
from torch_tiers.migrator.runtime.share_of_need import settle_budgets
from torch_tiers.migrator.runtime.streamed_state import StreamedState
from torch_tiers.migrator.runtime.streaming import Streaming
from torch_tiers.migrator.saved.garbage import Allowance
from torch_tiers.migrator.saved.mover import Mover
from torch_tiers.migrator.saved.saver import Saver
from torch_tiers.migrator.saved.tensors import Calls, HookTensors
from torch_tiers.migrator.streams.host import HostCompute
from torch_tiers.migrator.tape.recorder import Recorder
from torch_tiers.migrator.telemetry.counters import Counters


class Runtime:
    """Offloads or recomputes the saved tensors of every thread that trains, from `install` to `close`."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.armed = False  # whether anything has trained under it
        self.closed = False
        self._learned: Learned | None = None
        self._tensors: HookTensors | None = None
        self._recorder: Recorder | None = None
        self._calls: Calls  # with `_tensors`
        self._counters = Counters(timeline=options.timeline)
        self._time = HostTimer()
        self._devices = Devices(self._counters)
        self._progress = Progress(self._counters, self._devices)
        self._advice = Advice(options.advisor, options.links, options.pages, self._devices, self._counters)
        self._lock = threading.Lock()  # guards the choice of these three
        self._savers = Savers()
        models = self.models = Models(options.hbm)
        self._streaming = Streaming(lambda: self.options, models, self._devices, self._counters, self._savers.others)
        self.backward_begins, self.backward_over = self._streaming.backward_begins, self._streaming.backward_over
        of_all, pages = (lambda: self.options, self._devices, self._counters), lambda: self.options.pages()
        nvme = self.nvme = NvmePlacement(*of_all)
        self._state = PlacedState(pages, self._savers, self._streaming.moving, models.parameters, nvme)
        self.loading, self.run_step = self._state.loading, StreamedState(*of_all, self._state.masters, nvme)
        self._relief = Reliefs(self._state, self._streaming, self._progress)
        self._optimizers, self._allowance, self._pid = Optimizers(), Allowance(), os.getpid()

    # ------------------------------------------------------------------------------------ on, off

    def install(self) -> None:
        """Register with PyTorch. Touches no device.

        Raises
        ------
        AlreadyActive
            If another runtime is installed.
        """
        entry.install(self)

    def close(self) -> None:
        """Switch everything off, and wait for copies and disk requests that are under way. Idempotent."""
        if self.closed or os.getpid() != self._pid:
            return
        self.closed = True
        self._allowance.close()
        self._state.over()
        entry.uninstall()
        if self._savers.thread.saver is not None:
            self._savers.thread.saver.end_iteration()
        for saver in self._savers:
            for mover in saver.movers.armed:
                mover.learner.finish()
            self._learned = self.learned
            saver.pop()
        with closing(self._devices), closing(self.nvme), closing(self.run_step):
            self._streaming.close()

    def advise(self, advisor: Advisor | None) -> None:
        """Ask this advisor at every end of an iteration from now on."""
        self._advice.advisor = advisor

    def forked(self) -> None:
        """Give up in a forked child process: the engine's threads, streams and files belong to the parent."""
        self.armed = False
        self._allowance.close()
        self._savers.forked()
        self._streaming.forked()

    def saver(self) -> Saver | None:
        """Return the hooks of this thread, if they are on."""
        return self._savers.thread.saver

    def enter(self, module: nn.Module) -> object:
        """Take note that a forward begins in this thread; return whether `leave` is to be called when it ends.

        Most calls of modules within others do not come here: see `migrator/saved/native/calls.h`.
        """
        return self._time.timed(self._enter, module)

    def _enter(self, module: nn.Module) -> object:
        saver = self._savers.thread.saver or self._arm()
        if saver is None:
            return self._streaming.enter(module)
        if saver.resting and self._optimizers.period_due and torch._C._current_graph_task_id() == -1:
            self._iteration_begins(saver)
            # One has begun, so this is its first module, and no other has called it.
            if saver.resting and not self._optimizers.period_due and self._look_at(module):
                self._wake(saver)
        if saver.resting:
            return False
        within = self._streaming.expect()
        saver.enter(module)
        return within

    def leave(self) -> None:
        """Take note that a forward ends in this thread, also when it raised."""
        saver = self._savers.thread.saver
        if saver is not None and not saver.resting:
            self._time.timed(saver.leave)
        self._streaming.leave(outermost=saver is None or saver.modules.outside)

    def _arm(self) -> Saver | None:
        if not make_way():
            return None
        with self._lock:
            if self._tensors is None:
                try:
                    tensors = self.options.tensors()
                except TiersError as error:
                    self._refuse(error)
                self._recorder = self.options.recorder()  # which may be interrupted, as it takes long at first
                self._calls, self._tensors = entry.shorten(tensors), tensors
        called = self._make_mover, self._root_begins, self._iteration_over
        saver = Saver(*called, self._allowance, self._tensors, self._recorder)
        self.armed = True
        self._calls.arm(saver, saver.modules, self._optimizers)
        self._savers.switch_on(saver)  # last: from here on nobody comes here again
        self.options.armed()
        return saver

    # ------------------------------------------------------------------------------------ devices

    def _make_mover(self, device: torch.device) -> Mover | None:
        if not has_tiers(device):
            return None
        assert self._tensors is not None  # since this thread was armed
        try:
            clock = None if self._recorder is None else self._recorder.clock
            mover = self._devices.make_mover(device, self.options, self._tensors, clock, self._relief)
        except TiersError as error:
            self._refuse(error)
        self._recount_static()
        return mover

    def _iteration_begins(self, saver: Saver) -> None:
        """The allocator's period begins, if one is due. The device has nothing to do meanwhile: this is to be short."""
        if not self._optimizers.period_due or not torch.is_grad_enabled() or saver.movers.capturing():
            return
        # Here, not where the optimizer ends: by now the gradients are gone, and next to nothing is alive
        # that does not live as long as the program. Not within a capture, where nobody may wait for a stream.
        self._optimizers.period_due = False
        # Else others are in the middle of their iterations; or this one's is not over: it stepped in backward.
        # And while hooks rest nobody asks for a peak.
        if not saver.resting and self._savers.is_alone and not saver.place.in_backward:
            for mover in saver.movers.armed:
                mover.pass_by()
        if (pages := self.options.pages()) is None:
            return
        if not self._progress.steps:
            pages.begin()
            return
        with nullcontext() if saver.resting else saver.movers.untracked(), self._streaming.moving() as may:
            pages.period_over(alone=may, planning=any(mover.learner.planning for mover in saver.movers.armed))
        if saver.resting and any(pages.is_short(mover.engine.compute.device) for mover in saver.movers.armed):
            self._wake(saver)

    def _wake(self, saver: Saver) -> None:
        """Switch resting hooks on, as HBM is full."""
        self._learned = self.learned
        self._advice.forget()
        if saver.wake():
            self._progress.tell_timeline("hbm was full")
            if self._savers.is_alone:
                for mover in saver.movers.armed:
                    mover.engine.compute.pass_by(counts=False)

    def _root_begins(self, saver: Saver, root: nn.Module) -> None:
        self._state.forward_begins()
        self._iteration_begins(saver)
        self._look_at(root)
        self._streaming.forward_begins(root)
        if self._tensors is not None and not saver.movers.capturing():
            idle = all(mover.engine.compute.idle() for mover in saver.movers.armed)
            self._time.iteration_begins(self._tensors.spent(), self._counters.blocked, idle=idle)

    def _look_at(self, model: nn.Module) -> bool:
        """Check whether the budget holds the weights of all models so far; whether some are streamed."""
        if self._streaming.see(model):
            self._recount_static()
            if not self._progress.steps:
                self._state.make_room_before_training()
            try:
                self.models.check(self._streaming.hbm_saved)
            except BudgetTooSmall as error:
                self._refuse(error)
        return self._streaming.active

    def _refuse(self, error: TiersError) -> NoReturn:
        """End the program before it trains, as its configuration cannot be met."""
        if self.options.refuse is not None:
            self.options.refuse(error)
        raise error

    def _recount_static(self) -> None:
        """Count what lives as long as the program. Without a GPU no allocator does."""
        for shared in self._devices.opened.values():
            if isinstance(compute := shared.compute, HostCompute):
                held = weights.bytes_on(compute.device, self.models.tensors()) + self._optimizers.nbytes
                compute.static = held - self._streaming.hbm_saved(compute.device)

    # -------------------------------------------------------------------------- iterations and steps

    def _iteration_over(self, saver: Saver) -> None:
        self._progress.count_iteration()
        whole, saver.steps_before = saver.steps_before > 0, self._progress.steps
        advice, changed = self._advice.iteration_over(saver.movers.armed), False
        hooks = None if self._tensors is None else self._tensors.spent()
        host = None if hooks is None else self._time.iteration_over(hooks, self._counters.blocked)
        pages = self.options.pages()
        for mover in saver.movers.armed:
            device = mover.engine.compute.device
            threads = max(1, sum(device in other.movers.by_device for other in self._savers))
            overflow = FITS if pages is None else pages.overflow(device, threads)
            self._progress.note_unmanaged(mover.unmanaged)
            recorded = mover.recorder is not None
            if overflow.nbytes and not mover.plans.knows(overflow):
                self._progress.tell_timeline("hbm was full", device=str(device), bytes=overflow.nbytes)
            try:
                changed |= mover.end_iteration(whole=whole, alone=threads == 1, overflow=overflow, host=host)
                changed |= advice is not None and mover.plans.apply_advice(*advice, recorded=mover.recorder is not None)
            except NoPlanFits as error:
                if not self.closed:
                    self._refuse(error.out_of(mover.budget))
            if (mover.recorder is not None) != recorded:
                self._progress.tell_timeline("learned" if recorded else "learns anew", device=str(device))
            if mover.plans.room.pays_back():
                self._devices.pay_back(device)
        if pages is not None and (new := [mover for mover in saver.movers.armed if mover.plans.take_news()]):
            self._tell_pages(pages, saver, new)
        if changed and not self.closed:  # else they are never carried out
            self._progress.note_plans(saver.movers.armed)
        if settle_budgets(saver.movers, self._devices, self._streaming, self.options, self._refuse) or changed:
            saver.adopt(action for mover in saver.movers.armed for action in mover.actions())

    def _tell_pages(self, pages: PageAllocator, saver: Saver, movers: Sequence[Mover]) -> None:
        # At the end of a step. Elsewhere a layout is in use: by what backward is still to do, or by another thread.
        now = self._optimizers.period_due and self._savers.is_alone and not self.closed and not saver.movers.capturing()
        with saver.movers.untracked():  # no part of the next iteration, whose recorder there may be already
            for mover in movers:
                peaks = [predicted.peak["hbm"] for predicted in mover.learner.predictions if predicted is not None]
                pages.expect_new_plans(mover.engine.compute.device, max(peaks, default=mover.budget), now=now)

    def stepping(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note that an optimizer begins a step."""
        self._streaming.stepping()
        self._optimizers.stepping(optimizer)
        self._time.timed(self._state.stepping, optimizer, self._progress.steps)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note that an optimizer has made a step."""
        self._time.timed(self._state.stepped, optimizer)
        leads, counts = self._optimizers.stepped(optimizer)
        if leads:
            self._streaming.stepped()
        self._progress.count_step(leads=leads, counts=counts)
        # Later only of new ones: there may be one for each parameter.
        if self._progress.steps <= FIRST_STEPS or optimizer not in self._optimizers:
            self._optimizers.count(optimizer)
            self._recount_static()
        if torch._C._current_graph_task_id() != -1:  # a hook of backward's: there is more to come
            return
        saver = self._savers.thread.saver
        if saver is not None and saver.resting:
            saver.place.in_backward = False
            if leads:
                self._progress.count_iteration()
                self._advice.iteration_passed()
                if self._savers.is_alone:  # others ask for themselves what has flushed
                    for compute in (mover.engine.compute for mover in saver.movers.armed):
                        compute.pressed()  # which counts it
                        compute.end_resting_iteration()
        elif saver is not None:
            self._stepped(saver, leads=leads)
        if self._optimizers.ending and (pages := self.options.pages()) is not None:
            pages.step_over()

    def _stepped(self, saver: Saver, *, leads: bool) -> None:
        """End the iteration at an optimizer's step, in a thread whose hooks are on."""
        saver.leave_all()
        saver.end_iteration(stepped=leads)
        if self._optimizers.period_due and self._savers.is_alone:
            for mover in saver.movers.armed:
                mover.engine.compute.pass_by(counts=True)
        saver.stepped()
        # Of several threads one alone would see that HBM is full. While hooks rest nobody tells where forwards begin.
        if self._savers.is_alone and not self._streaming.active:
            saver.rest_if_idle()
            if saver.resting:
                self._progress.tell_timeline("hooks rest")

    # ----------------------------------------------------------------------------------- numbers

    @property
    def learned(self) -> Learned | None:
        """Return what was learned last; of several kinds of iterations those of the one that needs most HBM."""
        return self._savers.learned() or self._learned

    def numbers(self) -> dict[str, Any]:
        """Return the numbers for `stats.json`; HBM's as ``budget_hbm``, ``peak_hbm`` and ``beside_hbm``."""
        return self._progress.numbers(streamed_weights=self._streaming.nbytes, state_on_nvme=self.nvme.nbytes)
