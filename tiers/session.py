"""A session: builds the runtime from the configuration, and writes the run directory at its end."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from allocator.dram import DramArena
from allocator.nvme.store import NvmeStore
from allocator.sizes import MiB
from migrator.backing import Backing
from migrator.counters import Counters
from migrator.policies import AUTO
from migrator.runtime import BudgetTooSmall, Options, Runtime
from tiers.config import Config, ConfigError, load
from tiers.topology import default_dram_capacity, read_memory

log = logging.getLogger("tiers")

MARGIN = 512 * MiB  # of HBM that is left to others when no budget is set
STATS = "stats.json"


class Session:
    """One configuration at work in this process.

    Parameters
    ----------
    config : Config
        What the user asked for.
    refuse : callable, optional
        See `migrator.runtime.Options`.

    Raises
    ------
    ConfigError
        If the run directory holds an earlier run.
    """

    def __init__(self, config: Config, refuse: Callable[[BudgetTooSmall], None] | None = None) -> None:
        self._config = config
        self._run = _run_directory(config)
        self._ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._policy = AUTO if config.policy == "auto" else config.policy
        dram = config.dram.capacity
        self._dram_capacity = (default_dram_capacity(read_memory()) if dram is None else dram) // self._ranks
        self._nvme_capacity = (config.nvme.capacity or 0) // self._ranks if config.nvme.paths else 0
        self._dram: DramArena | None = None
        self._nvme: NvmeStore | None = None
        self.runtime = Runtime(
            Options(
                policy=self._policy,
                hbm=self._hbm,
                enforce=config.hbm.capacity is not None,
                capacity=self._dram_capacity + self._nvme_capacity,
                backing=self._make_backing,
                refuse=refuse,
            )
        )

    def _hbm(self, device: torch.device) -> int:
        if self._config.hbm.capacity is not None:
            return self._config.hbm.capacity
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            return free + torch.cuda.memory_reserved(device) - MARGIN
        return read_memory().available

    def _make_backing(self, counters: Counters, on_gpu: bool) -> Backing:
        if self._config.allocator == "pages":
            log.warning("allocator pages is not built yet: PyTorch's own is used, with the migrator")
        self._dram = DramArena(self._dram_capacity, pinned=on_gpu)
        if self._nvme_capacity:
            nvme = self._config.nvme
            self._nvme = NvmeStore(nvme.paths, self._nvme_capacity, gds=nvme.gds, checksum=nvme.checksum)
        return Backing(self._dram, self._nvme, counters)

    def open(self) -> None:
        """Start."""
        _prefer_expandable_segments()
        self.runtime.install()

    def close(self) -> None:
        """End: give everything back and write the run directory. Idempotent."""
        if self.runtime.closed:
            return
        self.runtime.close()
        stats = self.stats()
        if self._nvme is not None:
            self._nvme.close()
        if self._dram is not None:
            self._dram.close()
        if self._run is not None and self.runtime.armed:
            self._run.mkdir(parents=True, exist_ok=True)
            (self._run / STATS).write_text(json.dumps(stats, indent=2) + "\n")
            if self.runtime.learned is not None:
                trace, plan = self.runtime.learned
                (self._run / "trace.json").write_text(trace.to_json() + "\n")
                (self._run / "plan.json").write_text(plan.to_json() + "\n")

    def stats(self) -> dict[str, Any]:
        """What happened so far. Bytes are integers, times are seconds, sizes are this rank's."""
        numbers = self.runtime.numbers()
        device = numbers.pop("device")
        peak_hbm, budget_hbm = numbers.pop("peak_hbm"), numbers.pop("budget_hbm")
        return {
            "device": device,
            "allocator": "torch",
            "policy": self._policy,
            "budget": {"hbm": budget_hbm, "dram": self._dram_capacity, "nvme": self._nvme_capacity},
            "peak": {
                "hbm": peak_hbm,
                "dram": self._dram.peak if self._dram else 0,
                "nvme": self._nvme.peak if self._nvme else 0,
            },
            **numbers,
        }


def _prefer_expandable_segments() -> None:
    """Have PyTorch's allocator grow its segments in place, unless the user has configured it himself.

    With segments of fixed size, what groups leave behind is in holes that no larger request fits into: the
    reference GPT then ran out of memory 1.8 GiB below its budget; with this, reserved is 1.01 of allocated.
    """
    if torch.version.cuda and not any(
        os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    ):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def _run_directory(config: Config) -> Path | None:
    if config.run is None:
        return None
    rank = os.environ.get("RANK") if int(os.environ.get("WORLD_SIZE", "1")) > 1 else None
    directory = config.run / f"rank{rank}" if rank else config.run
    if (directory / STATS).exists() and not config.run_force:
        raise ConfigError(
            f"TIERS_RUN: {directory} holds an earlier run: name another directory or set TIERS_RUN_FORCE=1"
        )
    return directory


def install(config: Config) -> None:
    """Start a session that lasts as long as the process. Registers only; touches no device.

    Raises
    ------
    ConfigError
        If the run directory holds an earlier run.
    """
    session = Session(config, refuse=_exit)
    session.open()
    # Registered after PyTorch's own exit handlers, and so run before them: while the driver is still up.
    atexit.register(session.close)


def _exit(error: BudgetTooSmall) -> None:
    print(f"tiers: {error}", file=sys.stderr)
    raise SystemExit(2)


class session(contextlib.AbstractContextManager[Session]):
    """Run what is inside with tiers.

    Parameters
    ----------
    **arguments
        Values by name as on the command line, such as ``hbm="20GiB"``; they go before environment and files.

    Raises
    ------
    ConfigError
        On a value that its key does not accept.

    Examples
    --------
    >>> with tiers.session(hbm="20GiB", dram="64GiB"):  # doctest: +SKIP
    ...     train()
    """

    def __init__(self, **arguments: object) -> None:
        self._config = load({"allocator": "torch", **arguments}).config
        self._session: Session | None = None

    def __enter__(self) -> Session:
        self._session = Session(self._config)
        self._session.open()
        return self._session

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            self._session.close()
