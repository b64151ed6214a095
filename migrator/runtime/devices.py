"""The devices on which tensors are saved: streams, lanes and budget of each, and the tiers below HBM they share."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from torch_tiers.allocator.native import off_sequence
from torch_tiers.allocator.native.copy import lane
from torch_tiers.allocator.pages import PageAllocator
from torch_tiers.migrator.controller.background import in_background
from torch_tiers.migrator.controller.budget import SETTLED
from torch_tiers.migrator.controller.learner import Learner
from torch_tiers.migrator.controller.relief import Relief
from torch_tiers.migrator.model.links import PCIE_GEN5, Links
from torch_tiers.migrator.model.plan import FRAGMENTS, LAYOUTS, WITHOUT_LAYOUT
from torch_tiers.migrator.offload.backing import Backing
from torch_tiers.migrator.offload.direct import Direct, TakesAll
from torch_tiers.migrator.offload.engine import Engine
from torch_tiers.migrator.policies import POLICIES
from torch_tiers.migrator.runtime.loans import Loans
from torch_tiers.migrator.runtime.options import Options
from torch_tiers.migrator.saved.mover import Mover
from torch_tiers.migrator.saved.tensors import HookTensors
from torch_tiers.migrator.streams import Compute, Lane, Memory, OperatorClock
from torch_tiers.migrator.streams.cuda import CudaCompute, CudaLane
from torch_tiers.migrator.streams.host import HostCompute, HostLane
from torch_tiers.migrator.telemetry.counters import Counters
from torch_tiers.migrator.telemetry.device_log import DeviceLog

MAY_KEEP = {"auto", "checkpoint", "keep"}  # policies that move nothing, or nothing that may as well stay
STATE_LANES = "state_read", "state_write"
RECORDINGS = 3  # of the first iterations: in each the host is late somewhere

log = logging.getLogger("tiers")


@dataclass(frozen=True, slots=True)
class Device:
    """The part of a device that all threads share that train on it.

    Attributes
    ----------
    budget : int
        HBM that the process may use, in bytes.
    beside : int
        Bytes of it outside of PyTorch's allocator: staging slots of the direct path.
    holes : int
        Bytes of the rest that plans may not count on: segments of PyTorch's allocator that are in use in part, since
        before the budget was known.
    direct : Direct or None
        The path to NVMe past host memory.
    links : Links
        The assumed bandwidths.
    warned : set of str
        See `Learner`.
    log : DeviceLog or None
        Is told what groups do; made once the budget is known.
    provisional : bool
        Whether the budget holds only until it is known what an iteration needs: then it is to be a share of that.
    """

    compute: Compute
    out: Lane
    back: Lane
    budget: int
    beside: int = 0
    holes: int = 0
    direct: Direct | None = None
    links: Links = PCIE_GEN5
    warned: set[str] = field(default_factory=set)
    log: DeviceLog | None = None
    provisional: bool = False

    @property
    def room(self) -> int:
        """Return the part of the budget that is left for the program, in bytes."""
        return self.budget - self.beside


def _margin(device: torch.device, options: Options) -> float:
    """Return the part of the budget that plans leave free."""
    if device.type != "cuda":
        return SETTLED  # the room settles within that of the target, on either side: the budget lies above it
    return FRAGMENTS if options.pages() is None else LAYOUTS


def open_device(
    device: torch.device,
    counters: Counters,
    budget: int,
    memory: Memory | None = None,
) -> Device:
    """Make a device's streams and lanes.

    `memory` allocates a GPU's memory, if that is not PyTorch's allocator.

    Raises
    ------
    NoLane
        If the library or the driver that a GPU's lanes need is missing.
    """
    out, back = lanes(device, ("d2h", "h2d"), counters)
    if device.type != "cuda":
        return Device(HostCompute(counters), out, back, budget)
    return Device(CudaCompute(device, counters, lane.load(), memory), out, back, budget)


def lanes(device: torch.device, names: tuple[str, str], counters: Counters) -> tuple[Lane, Lane]:
    """Make two lanes of a device, one for each direction of a link."""
    return open_lane(device, names[0], counters), open_lane(device, names[1], counters)


def state_lanes(device: torch.device, counters: Counters) -> tuple[Lane, Lane]:
    """Make two lanes for optimizer state: to a device, and back."""
    for name in STATE_LANES:
        counters.moved.setdefault(name, 0)
    return lanes(device, STATE_LANES, counters)


def open_lane(device: torch.device, name: str, counters: Counters) -> Lane:
    """Make a lane of a device."""
    return CudaLane(device, name, counters, lane.load()) if device.type == "cuda" else HostLane(name, counters)


class Devices:
    """All devices of a runtime, and the tiers below HBM that they share. Thread-safe."""

    def __init__(self, counters: Counters) -> None:
        self.opened: dict[torch.device, Device] = {}
        self._counters = counters
        self._backing: Backing | None = None
        self._limited: set[torch.device] = set()  # those on which PyTorch's allocator stays within the budget
        self._short = False  # of room below HBM: what stays may need more than the budget
        self._loans = Loans()
        self._withheld: dict[torch.device, PageAllocator] = {}  # those that have less than their budget
        self._lock = threading.Lock()  # so that each is made once

    def make_mover(
        self,
        device: torch.device,
        options: Options,
        tensors: HookTensors,
        operators: OperatorClock | None,
        relief: Callable[[torch.device], Relief],
    ) -> Mover:
        """Make the mover of one thread for a device; open the device if it is the first.

        With `operators`, operators are timed one by one if several ranks take part. For `relief` see `Learner`.

        Raises
        ------
        TiersError
            If a tier below HBM cannot be set up as configured.
        """
        with self._lock:
            backing = self._open_backing(options)
            shared = self.opened.get(device) or self._open(device, options)
            shared.compute.operators = operators
        engine = Engine(shared.compute, shared.out, shared.back, backing, tensors, shared.direct)
        if shared.log is not None:
            engine.tell(shared.log)
        target = max(0, int(shared.room * (1 - _margin(device, options))) - shared.holes)
        learner = Learner(
            POLICIES[options.policy],
            target,
            shared.links,
            in_background,
            RECORDINGS,
            # Without a GPU the budget is counted, not enforced; our own allocator goes on in DRAM.
            must_fit=device.type == "cuda" and options.pages() is None,
            budget=shared.room,
            plan_cache=options.plan_cache(device, target),
            warned=shared.warned,
            begun=self._counters.iterations,
            relief=relief(device),
            without_layout=int(WITHOUT_LAYOUT * shared.room) if device.type == "cuda" and options.pages() else 0,
        )
        lent, keeps = 0, options.policy == "keep"
        if device.type == "cuda" and not keeps:
            lent = self._loans.take(device, shared.room, backing, options.pages(), strict=options.strict)
        return Mover(engine, learner, shared.room, tensors, keeps=keeps, spills=options.pages() is not None, lent=lent)

    def backing(self, options: Options) -> Backing:
        """Return what stores groups below HBM, made if there was none.

        Raises
        ------
        TiersError
            If a tier below HBM cannot be set up as configured.
        """
        with self._lock:
            return self._open_backing(options)

    def _open_backing(self, options: Options) -> Backing:
        if self._backing is None:
            self._backing = options.backing(self._counters, torch.cuda.is_available())
            self._backing.at_shortage = self._lift_limits
            if options.policy not in MAY_KEEP:
                self._backing.say_if_nothing_fits()
        return self._backing

    def open(self, device: torch.device, options: Options) -> Device:
        """Return a device, opened if it was not.

        Raises
        ------
        TiersError
            If what it needs cannot be had.
        """
        with self._lock:
            return self.opened.get(device) or self._open(device, options)

    def settle_budget(self, device: torch.device, needed: int, options: Options) -> None:
        """Replace a device's provisional budget by the share of what an iteration needs: later movers have that."""
        assert options.settle_budget is not None
        with self._lock:
            shared, pages = self.opened[device], options.pages() if device.type == "cuda" else None
            if not shared.provisional:  # another thread was first
                return
            budget = options.settle_budget(device, needed, shared.budget)
            if shared.beside >= budget:
                raise TakesAll(shared.beside, device, budget)
            if pages is not None:
                pages.withhold(device, shared.beside + shared.budget - budget)
                self._withheld[device] = pages
            if shared.log is not None:
                shared.log.budget = budget
            shared = replace(shared, budget=budget, provisional=False)
            if device.type == "cuda" and pages is None:
                # To look also frees what the first steps reserved, which would stay until the limit is met.
                shared = replace(shared, holes=max(shared.holes, holes(device)))
                self._limit(device, shared)
            self.opened[device] = shared

    def _limit(self, device: torch.device, shared: Device) -> None:
        """Have PyTorch's allocator stay within the budget, unless there is no room below HBM."""
        if not self._short:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, shared.room / total), device)
            self._limited.add(device)
            if self._short:  # for another thread found so since that was asked
                self._lift_limits()

    def pay_back(self, device: torch.device) -> None:
        """Take note that one thread no longer needs HBM beyond the budget."""
        with self._lock:
            self._loans.pay_back(device)

    def _open(self, device: torch.device, options: Options) -> Device:
        budget = options.hbm(device)
        pages = options.pages() if device.type == "cuda" else None
        memory = None if pages is None else Memory(pages.peaks(device), off_sequence, partial(pages.tidy, device))
        shared = open_device(device, self._counters, budget, memory)
        if device.type == "cuda" and pages is None:
            shared = replace(shared, holes=holes(device))
        shared = self._with_direct_way(shared, device, options)
        log = DeviceLog(str(device), self._counters, budget, shared.beside, options.below)
        shared = replace(shared, log=log, provisional=options.settle_budget is not None)
        if pages is not None:  # which an earlier session may have given more
            pages.withhold(device, shared.beside + max(0, pages.limit(device) - budget))
            self._withheld[device] = pages
        if device.type == "cuda" and options.enforce:
            self._limit(device, shared)
        self.opened[device] = shared
        return shared

    def _with_direct_way(self, shared: Device, device: torch.device, options: Options) -> Device:
        way = options.direct(device)
        if way is None:
            return replace(shared, links=options.links.staged)
        if way.nbytes >= shared.budget:
            way.out.close()
            way.back.close()
            raise TakesAll(way.nbytes, device, shared.budget)
        # What is copied within HBM is counted nowhere: the drives have yet to take it.
        out, back = lanes(device, ("gds_write", "gds_read"), Counters())
        return replace(
            shared,
            direct=Direct(way, out, back, self._counters),
            beside=way.nbytes,
            links=options.links.with_direct_way(way.write, way.read),
        )

    def _lift_limits(self) -> None:
        """Let PyTorch's allocator exceed the budgets: groups that find no room below HBM would end training."""
        self._short = True
        for device in list(self._limited):
            torch.cuda.set_per_process_memory_fraction(1.0, device)
            self._limited.discard(device)

    def close(self) -> None:
        """Wait for copies and disk requests that are under way; lift the limits that were set.

        If it is interrupted while it waits for one, it goes on with the others.
        """
        with ExitStack() as ending:  # in reverse order
            if self._backing is not None:
                ending.callback(self._backing.close)
            ending.callback(self._lift_limits)
            ending.callback(self._restore_page_limits)
            for shared in self.opened.values():
                for each in (shared.compute, shared.back, shared.out, shared.direct):
                    if each is not None:
                        ending.callback(each.close)

    def _restore_page_limits(self) -> None:
        """Restore the page allocator's limits: it outlives the session."""
        self._loans.close()
        for device, pages in self._withheld.items():
            pages.withhold(device, 0)
        self._withheld.clear()


def holes(device: torch.device) -> int:
    """Free what PyTorch's allocator can free; return the bytes that it reserves beyond those in use.

    These are next to none unless a program has run before: a session that opens in the middle, a share of its need.
    """
    if torch.cuda.is_current_stream_capturing():
        return 0  # nothing may be freed now
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def has_tiers(device: torch.device) -> bool:
    """Return whether tensors on `device` move: those of GPUs, or of the host if there is no GPU."""
    return device.type == "cuda" or (device.type == "cpu" and not torch.cuda.is_available())
