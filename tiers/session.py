"""A session: builds the runtime from the configuration, and writes the run directory at its end."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from allocator import adapter
from allocator.dram import DramArena
from allocator.errors import TiersError
from allocator.extension import CannotBuild
from allocator.ledger import Account, Ledger
from allocator.nvme.store import NvmeStore
from allocator.pages import PageAllocator
from allocator.pinning import return_what_is_freed
from allocator.room import Room
from allocator.sizes import PAGE, GiB, MiB
from migrator import native
from migrator import tensors as in_python
from migrator.backing import Backing
from migrator.counters import Counters
from migrator.links import links_from
from migrator.runtime import Options, Runtime
from migrator.tensors import Tensors
from tiers.config import Config, ConfigError, load
from tiers.monitor.build import build as build_monitor
from tiers.places import LEDGERS, of_user
from tiers.topology import default_dram_capacity, memory_left, numa_node, read_memory

log = logging.getLogger("tiers")

_pages: PageAllocator | None = None  # once it is under PyTorch it stays there, whatever becomes of the session

MARGIN = 512 * MiB  # of HBM that is left to others when no budget is set
IDLE_SECONDS = 120.0  # after which dram that nobody uses goes back to the system
STATS = "stats.json"


class Session:
    """One configuration at work in this process.

    The capacities of `dram` and `nvme` are the node's: its processes share them through a ledger, first come,
    first served, so a rank that needs more than another may have it. Without a ledger each takes an equal share.

    Parameters
    ----------
    config : Config
        What the user asked for.
    refuse : callable, optional
        See `migrator.runtime.Options`.

    Raises
    ------
    ConfigError
        If the run directory holds an earlier run, or the ledger that was named cannot be used.
    """

    def __init__(self, config: Config, refuse: Callable[[TiersError], None] | None = None) -> None:
        self._config = config
        self._pid = os.getpid()
        self._run = _run_directory(config)
        self._ledger = _open_ledger(config)
        self._ranks = 1 if self._ledger else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        dram = self._default_dram() if config.dram.capacity is None else config.dram.capacity
        self._dram_capacity = dram // self._ranks
        self._nvme_capacity = (config.nvme.capacity or 0) // self._ranks if config.nvme.paths else 0
        self._dram: DramArena | None = None
        self._nvme: NvmeStore | None = None
        self._monitor = build_monitor(config, self._ledger.directory if self._ledger else None)
        self.runtime = Runtime(
            Options(
                policy=config.policy,
                hbm=self._hbm,
                enforce=config.hbm.capacity is not None and config.allocator != "pages",
                backing=self._make_backing,
                refuse=refuse,
                pages=lambda: _pages,
                links=links_from(asdict(config.links), disk=self._nvme_capacity > 0),
                advisor=self._monitor,
                tensors=self._tensors,
            )
        )

    def _default_dram(self) -> int:
        # The ledger subtracts what other processes hold, which is missing from what the system has available.
        held = self._ledger.used("dram") if self._ledger else 0
        return default_dram_capacity(read_memory()) + held // 2

    def _hbm(self, device: torch.device) -> int:
        if self._config.hbm.capacity is not None:
            return self._config.hbm.capacity
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            return free + torch.cuda.memory_reserved(device) - MARGIN
        return read_memory().room

    def _tensors(self) -> Tensors:
        if self._config.native == "on":
            try:
                return native.load(native.build(cache_directory()))
            except CannotBuild as error:
                raise CannotBuild(f"{error}; with TIERS_NATIVE=auto the hooks go on in Python") from error
        wanted = self._config.native == "auto" and torch.cuda.is_available()
        return native.best(cache_directory()) if wanted else in_python

    def _make_backing(self, counters: Counters, on_gpu: bool) -> Backing:
        if self._ledger is None:
            text = "no ledger can be kept in %s, so dram and nvme are this rank's alone: 1/%d of the capacities"
            log.warning(text, " or ".join(map(str, LEDGERS)), self._ranks)
        if not on_gpu:
            return_what_is_freed()
        self._dram = DramArena(
            self._dram_capacity,
            pinned=on_gpu,
            step=_step(self._dram_capacity),
            account=self._account("dram", self._dram_capacity),
            node=_node_of_gpu() if on_gpu else None,
            room=_room,
            idle_after=IDLE_SECONDS,
        )
        if self._nvme_capacity:
            nvme = self._config.nvme
            self._nvme = NvmeStore(
                nvme.paths,
                self._nvme_capacity,
                gds=nvme.gds,
                checksum=nvme.checksum,
                step=_step(self._nvme_capacity),
                account=self._account("nvme", self._nvme_capacity),
            )
        return Backing(self._dram, self._nvme, counters)

    def _account(self, tier: str, capacity: int) -> Account | None:
        return self._ledger.open_account(tier, capacity) if self._ledger else None

    def open(self) -> None:
        """Start."""
        if self._config.allocator == "pages":
            before_cuda(self._install_pages)
        _prefer_expandable_segments()
        self.runtime.install()

    def _install_pages(self) -> None:
        """Put the page-grouping allocator under PyTorch, or say why not, and go on with PyTorch's own."""
        global _pages
        if _pages is not None or self.runtime.closed:
            return
        # Without a ledger it and the arena, which may both grow, have half each.
        account = self._account("dram", self._dram_capacity)
        dram = self._dram_capacity if account else self._dram_capacity // 2
        try:
            library = adapter.build(cache_directory())
            pages = PageAllocator(library, self._config.hbm.capacity or 0, dram, account, _room)
            pages.install()
        except TiersError as error:
            log.warning("%s; PyTorch's own allocator is used, with the migrator", error)
            if self._config.hbm.capacity is not None:
                self.runtime.options = replace(self.runtime.options, enforce=True)
        else:
            _pages = pages

    def close(self) -> None:
        """End: give everything back and write the run directory. Idempotent."""
        if self.runtime.closed or os.getpid() != self._pid:  # a forked child has none of the threads
            return
        self.runtime.close()
        if self._monitor is not None:
            self._monitor.close()
        stats = self.stats()
        if self._nvme is not None:
            self._nvme.close()
        if self._dram is not None:
            self._dram.close()
        if self._run is not None and self.runtime.armed:
            self._write(self._run, stats)

    def _write(self, directory: Path, stats: dict[str, Any]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        if (directory / STATS).exists() and not self._config.run_force:
            # Trainers started by hand, without RANK, share the directory: none must overwrite another's.
            directory = directory / f"process{os.getpid()}"
            directory.mkdir()
        (directory / STATS).write_text(json.dumps(stats, indent=2) + "\n")
        if self.runtime.learned is not None:
            trace, plan = self.runtime.learned
            (directory / "trace.json").write_text(trace.to_json() + "\n")
            (directory / "plan.json").write_text(plan.to_json() + "\n")

    def stats(self) -> dict[str, Any]:
        """What happened so far. Bytes are integers, times are seconds, peaks are this rank's."""
        numbers = self.runtime.numbers()
        device = numbers.pop("device")
        peak_hbm, budget_hbm = numbers.pop("peak_hbm"), numbers.pop("budget_hbm")
        paged = [core.counts() for _, core in _pages.cores()] if _pages is not None else []
        if paged:  # what PyTorch has reserved lies in both tiers
            peak_hbm = max(counts.hbm_peak for counts in paged)
        return {
            "device": device,
            "allocator": "torch" if _pages is None else "pages",
            "policy": self._config.policy,
            "budget": {"hbm": budget_hbm, "dram": self._dram_capacity, "nvme": self._nvme_capacity},
            "peak": {
                "hbm": peak_hbm,
                "dram": (self._dram.peak if self._dram else 0) + sum(counts.dram_peak for counts in paged),
                "nvme": self._nvme.peak if self._nvme else 0,
            },
            **numbers,
            "monitor": self._monitor.watch.summary() if self._monitor is not None else None,
        }


def before_cuda(install: Callable[[], None]) -> None:
    """Have `install` called when the program is about to initialise CUDA: too early would make a context for it."""
    if not torch.version.cuda:
        log.warning("allocator pages needs a GPU: the migrator works on host memory")
        return
    if torch.cuda.is_initialized():
        install()
        return
    begin: Callable[[], None] = torch.cuda._lazy_init

    def installing() -> None:
        if torch.cuda._lazy_init is installing:
            torch.cuda._lazy_init = begin
            install()
        begin()

    torch.cuda._lazy_init = installing


def cache_directory() -> Path:
    """Where what is built for this user lies."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch-tiers"


def _node_of_gpu() -> int | None:
    """The NUMA node that the current GPU is attached to, if that is known."""
    gpu: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    try:
        return numa_node(f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0")
    except AttributeError:  # an older PyTorch
        return None


def _room() -> Room:
    """What the machine and the cgroup leave now."""
    return Room(*memory_left(read_memory()))


def _step(capacity: int) -> int:
    """Bytes to grow a tier by: little enough that one rank's first step leaves room for the others'."""
    return max(PAGE, min(GiB, capacity // 16))


def _open_ledger(config: Config) -> Ledger | None:
    if config.ledger is not None:
        try:
            return Ledger(config.ledger)
        except OSError as error:
            raise ConfigError(
                f"TIERS_LEDGER: no ledger can be kept at {config.ledger}: {error.strerror or error}; it must be a "
                "directory of this user alone, or a name in one that exists"
            ) from error
    for place in LEDGERS:
        with contextlib.suppress(OSError):  # said where it matters, when something is about to be shared
            return Ledger(of_user(place))
    return None


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
    standing = next(parent for parent in (directory, *directory.parents) if parent.exists())
    if not standing.is_dir() or not os.access(standing, os.W_OK):
        raise ConfigError(f"TIERS_RUN: {directory} cannot be written: {standing} is no directory that you may write to")
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


def _exit(error: TiersError) -> None:
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
