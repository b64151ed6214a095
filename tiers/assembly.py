"""Puts the tiers, the allocator, the monitor and the runtime together as the configuration says."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, TypeAlias

import torch

from torch_tiers import paging, run_directory
from torch_tiers.allocator.errors import TiersError
from torch_tiers.allocator.extensions.extension import CannotBuild
from torch_tiers.allocator.host.dram import DramArena
from torch_tiers.allocator.host.pinning import return_what_is_freed
from torch_tiers.allocator.nvme.store import NvmeStore
from torch_tiers.allocator.sizes import Share
from torch_tiers.config import Config, ConfigError
from torch_tiers.drives import Drives
from torch_tiers.launcher import processes, rank
from torch_tiers.migrator.model.links import Links, links_from
from torch_tiers.migrator.offload.backing import Backing
from torch_tiers.migrator.offload.direct import DirectWay
from torch_tiers.migrator.policies import recomputes
from torch_tiers.migrator.program.losses import Losses
from torch_tiers.migrator.runtime.options import Options
from torch_tiers.migrator.runtime.runtime import Runtime
from torch_tiers.migrator.saved import native
from torch_tiers.migrator.saved.tensors import HookTensors
from torch_tiers.migrator.tape import recorder as tape
from torch_tiers.migrator.tape import substitutes
from torch_tiers.migrator.tape.recorder import Recorder
from torch_tiers.migrator.telemetry.counters import Counters
from torch_tiers.migrator.telemetry.timeline import Timeline
from torch_tiers.migrator.weights.streamer import MakeSubstitutes
from torch_tiers.monitor.build import build as build_monitor
from torch_tiers.places import boards, cache_directory
from torch_tiers.plan_cache import PlanCacheOnDisk
from torch_tiers.planning.corrections import to_json
from torch_tiers.shares import Shares, node_of_gpu, room, rooms_in_memory, step
from torch_tiers.sigterm import BeforeSigterm
from torch_tiers.spoken import Spoken, describe, say_if_untested

log = logging.getLogger("tiers")

Size: TypeAlias = int | str  # bytes, or such as "24GiB"
Place: TypeAlias = str | os.PathLike[str]

IDLE_SECONDS = 120.0  # after which dram that nobody uses goes back to the system


class Session:
    """One configuration at work in this process.

    Parameters
    ----------
    config : Config
        What the user asked for.
    refuse : callable, optional
        See `migrator.runtime.options.Options`.

    Raises
    ------
    ConfigError
        If the run directory holds an earlier run, the ledger that was named cannot be used, the policy needs an extra
        that is not installed, or our allocator is under PyTorch already, with another budget.
    """

    def __init__(self, config: Config, refuse: Callable[[TiersError], None] | None = None) -> None:
        self._config = config
        self._pid = os.getpid()
        _check_policy(config.policy)
        if config.allocator == "pages":
            paging.check_budget(config.hbm.nbytes)
        self._run = run_directory.find(config)
        self._timeline = Timeline(rank=rank()) if self._run is not None else None
        self._losses = Losses() if self._run is not None else None
        self._spoken = Spoken()
        self._written = False  # at a SIGTERM that did not end the program: that of a container's first process
        self._before_sigterm = BeforeSigterm(lambda: self._write_run(self.stats()))
        self._shares = Shares(config)
        if (timeline := self._timeline) is not None:
            self._shares.claims.told = lambda **facts: timeline.happened("dram was short", **facts)
        self._dram: DramArena | None = None
        self._nvme: NvmeStore | None = None
        self._drives: Drives | None = None
        self._monitor = build_monitor(config, boards(config.ledger), self._timeline, self._shown)
        self.runtime = Runtime(
            Options(
                policy=config.policy,
                hbm=self._budget,
                strict=config.hbm.strict,
                enforce=config.hbm.nbytes is not None and config.allocator != "pages",
                settle_budget=self._shares.settle if isinstance(config.hbm.capacity, Share) else None,
                backing=self._make_backing,
                tensors=self._tensors,
                direct=self._direct_way,
                refuse=refuse,
                pages=paging.installed,
                links=self._links(),
                advisor=self._monitor,
                recorder=self._recorder,
                substitutes=self._substitutes,
                plan_cache=self._plan_cache,
                armed=self._armed,
                timeline=self._timeline,
                below=self._in_use_below,
            )
        )

    def __repr__(self) -> str:
        runtime = self.runtime
        state = "closed" if runtime.closed else "at work" if runtime.armed else "waits for a training step"
        return f"<Session: {describe(self._config)}, {state}>"

    def _budget(self, device: torch.device) -> int:
        """The HBM budget of a device, in bytes."""
        # What our allocator has reserved may lie in DRAM: where no budget is set, only it knows its own limit.
        pages = None if self._shares.has_budget(device) else paging.installed()
        return (pages.limit(device) if pages is not None else 0) or self._shares.hbm(device)

    def _links(self) -> Links:
        shares = self._shares
        # First come, first served: to plan for all of the node's would starve the others.
        dram, nvme = (share // (shares.ranks if shares.ledger else 1) for share in (shares.dram, shares.nvme))
        return links_from(asdict(self._config.links), disk=nvme > 0, below=dram + nvme, dram=dram)

    def _tensors(self) -> HookTensors:
        """The C++ part of the hooks.

        Raises
        ------
        CannotBuild
            If it is not there and cannot be compiled here.
        """
        try:
            return native.load(native.MODULE.build(cache_directory()))
        except CannotBuild as error:
            raise CannotBuild(
                f"tiers compiles its hooks at first use, and cannot here: {error}. Mend that, or run without tiers: "
                "without `tiers run`, TIERS_ALLOCATOR and tiers.session"
            ) from error

    def _recorder(self) -> Recorder | None:
        if not (self._config.replay and recomputes(self._config.policy)):
            return None
        recorder = tape.load(cache_directory())
        if isinstance(recorder, str):
            log.warning("nothing is recomputed: %s", recorder)
            return None
        return recorder

    def _substitutes(self) -> MakeSubstitutes | None:
        make = substitutes.load(cache_directory())
        if isinstance(make, str):
            log.warning("weights that lie in dram are not streamed: %s", make)
            return None
        return make

    def _plan_cache(self, device: torch.device, target: int) -> PlanCacheOnDisk | None:
        """What earlier runs learned of programs on such a device, with that target."""
        config = self._config
        # Without a budget that is set the target is what is free, which differs from run to run.
        if not config.plan_cache or not self._shares.has_budget(device):
            return None
        named = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        versions = version("torch-tiers"), torch.__version__
        asked = config.allocator, config.policy, config.replay
        return PlanCacheOnDisk(cache_directory() / "plans", *versions, *asked, named, platform.node(), target)

    def _make_backing(self, counters: Counters, on_gpu: bool) -> Backing:
        shares, nvme = self._shares, self._config.nvme
        shares.say_if_alone()
        if not on_gpu:
            return_what_is_freed()
        self._dram = DramArena(
            shares.dram,
            pinned=on_gpu,
            step=step(shares.dram),
            account=shares.account("dram", shares.dram),
            node=node_of_gpu() if on_gpu else None,
            room=room,
            idle_after=IDLE_SECONDS,
        )
        if (pages := paging.installed()) is not None:
            pages.borrow(self._dram.release_idle)
        if shares.nvme:
            self._drives = Drives(
                nvme,
                shares.nvme,
                step=step(shares.nvme),
                account=shares.account("nvme", shares.nvme),
                rooms=rooms_in_memory(nvme.paths),
                cache=cache_directory(),
                on_gpu=on_gpu,
            )
            self._nvme = self._drives.store
        return Backing(self._dram, self._nvme, counters)

    def _direct_way(self, device: torch.device) -> DirectWay | None:
        way = None if self._drives is None else self._drives.direct_way(device)
        if way is None:
            return None
        told = self._config.links
        return replace(way, write=told.gds_write or way.write, read=told.gds_read or way.read)

    def _in_use_below(self) -> dict[str, int]:
        """Bytes in use of the tiers below HBM, but for what our allocator has there."""
        used = {} if self._dram is None else {"dram": self._dram.used}
        return used if self._nvme is None else used | {"nvme": self._nvme.used}

    def _shown(self) -> dict[str, Any]:
        """What ``tiers top`` shows of the tiers below HBM, and of the job. Asked for on the monitor's thread."""
        used, pages = {"dram": 0, "nvme": 0} | self._in_use_below(), paging.installed()
        if pages is not None:
            used["dram"] += sum(core.counts().dram for _, core in pages.cores())
        budgets = {"dram_budget": self._shares.dram, "nvme_budget": self._shares.nvme}
        return {**used, **budgets, "rank": rank() if processes("WORLD_SIZE") > 1 else None}

    def open(self) -> None:
        """Start."""
        say_if_untested()
        if self._config.allocator == "pages":
            paging.before_cuda(self._install_pages)
        paging.prefer_expandable_segments()
        self.runtime.install()
        if self._losses is not None:
            self._losses.install()

    def _install_pages(self) -> None:
        """Put the page-grouping allocator under PyTorch, or say why not, and go on with PyTorch's own."""
        if self.runtime.closed:
            return
        # Without a ledger it and the arena, which may both grow, have half each.
        account = self._shares.account("dram", self._shares.dram)
        dram = self._shares.dram if account else self._shares.dram // 2
        try:
            paging.install(self._config.hbm.nbytes or 0, dram, account)
        except TiersError as error:
            log.warning("%s; PyTorch's own allocator is used, with the migrator", error)
            self._config = replace(self._config, allocator="torch")
            if self._config.hbm.nbytes is not None:
                self.runtime.options = replace(self.runtime.options, enforce=True)

    def close(self, *, at_exit: bool = False) -> None:
        """End: give everything back and write the run directory. Idempotent.

        Optimizer state on NVMe comes back to memory first, unless the process ends as well (`at_exit`).
        """
        if self.runtime.closed or os.getpid() != self._pid:  # a forked child has none of the threads
            return
        with ExitStack() as ending:  # in reverse order, and with the others where one is interrupted
            ending.callback(self._conclude)
            if self._dram is not None:
                ending.callback(self._dram.close)
                if (pages := paging.installed()) is not None:
                    ending.callback(pages.borrow, None)
            if self._nvme is not None:
                ending.callback(self._nvme.close)
            if self._monitor is not None:
                ending.callback(self._monitor.close)
            ending.callback(self.runtime.close)
            if not at_exit:
                ending.callback(self.runtime.nvme.bring_back)
            if self._losses is not None:
                ending.callback(self._losses.uninstall)

    def _conclude(self) -> None:
        """Write the run directory, and say what the run came to."""
        stats = self.stats()
        if self._run is not None and self._drives and any(stats["moved"][lane] for lane in ("disk_write", "gds_write")):
            with suppress(KeyboardInterrupt):  # whoever is in a hurry gets the run directory all the same
                stats["worn"] = self._drives.worn()
        self._write_run(stats)
        self._shares.say_if_without_effect(trained=self.runtime.armed)
        self._spoken.ends(self.runtime, self._links(), stats, self._run, written=self._written)

    def _armed(self) -> None:
        # Not earlier: by now the program has its own handlers, and who never trains is left alone.
        if self._run is not None:
            self._before_sigterm.set()
        self._spoken.begins(describe(self._config))

    def _write_run(self, stats: dict[str, Any]) -> None:
        self._before_sigterm.clear()  # from here on it would write beside what is half written
        if self._run is not None and self._timeline is not None and self.runtime.armed:
            try:
                force = self._config.run_force or self._written
                learned = self.runtime.learned
                self._run = run_directory.write(self._run, stats, learned, self._timeline, force=force)
                self._written = True
                if self._losses is not None:
                    with suppress(RuntimeError):  # of a device, which the program has met before
                        run_directory.write_losses(self._run, self._losses.read())  # last, as it waits for devices
            except OSError as error:  # the training is done, and an error of its own matters more than this one
                text = (
                    "TIERS_RUN: %s cannot be written: %s; the numbers of this run are lost: name a writable directory"
                )
                log.error(text, self._run, error.strerror or error)

    def stats(self) -> dict[str, Any]:
        """What happened so far. Bytes are integers, times are seconds, peaks are this rank's."""
        numbers = self.runtime.numbers()
        peak_hbm, budget_hbm = numbers.pop("peak_hbm"), numbers.pop("budget_hbm")
        pages = paging.installed()
        state = 0 if pages is None else pages.state_in_dram
        demoted = state + numbers.pop("streamed_weights")
        paged = [core.counts() for _, core in pages.cores()] if pages is not None else []
        if paged:  # what PyTorch has reserved lies in both tiers
            peak_hbm = max(counts.hbm_peak for counts in paged)
            demoted = max(demoted, sum(counts.demoted for counts in paged))  # which the program may have freed by now
        peak_hbm += numbers.pop("beside_hbm")  # slots of the direct way, which are there throughout
        return {
            "device": numbers.pop("device"),
            "allocator": "torch" if pages is None else "pages",
            "policy": self._config.policy,
            "budget": {"hbm": budget_hbm, "dram": self._shares.dram, "nvme": self._shares.nvme},
            "budget_share": self._shares.of_need,
            "peak": {
                "hbm": peak_hbm,
                "dram": (self._dram.peak if self._dram else 0) + sum(counts.dram_peak for counts in paged),
                "nvme": self._nvme.peak if self._nvme else 0,
            },
            **numbers,
            "corrections": None if (learned := self.runtime.learned) is None else to_json(learned.corrections),
            "bounced": self._nvme.bounced if self._nvme else 0,
            "host_memory": self._shares.claims.to_json(),
            "demoted": demoted,
            "state_in_dram": state,
            "state_in_place": 0 if pages is None else pages.state_in_place,
            "overflow": 0 if pages is None else pages.lasting_overflow,
            "pages": paging.account(paged) if paged else None,
            "monitor": self._monitor.watch.summary() if self._monitor is not None else None,
        }


def _check_policy(policy: str) -> None:
    """Refuse a policy that lacks what it needs before training starts: it would fail at the first plan."""
    if policy == "autotm" and find_spec("scipy") is None:
        raise ConfigError("policy autotm needs scipy: pip install scipy")
