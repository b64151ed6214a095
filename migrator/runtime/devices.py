"""The devices on which anything is saved: streams, lanes and budget of each, and where all their groups go."""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from torch_tiers.allocator.errors import TiersError
from torch_tiers.allocator.native import off_sequence
from torch_tiers.allocator.native.copy import lane
from torch_tiers.allocator.pages import PageAllocator
from torch_tiers.allocator.sizes import format_size
from torch_tiers.migrator.controller.background import in_background
from torch_tiers.migrator.controller.feedback import SETTLED
from torch_tiers.migrator.controller.learner import Learner
from torch_tiers.migrator.model.links import PCIE_GEN5, Links
from torch_tiers.migrator.offload.backing import Backing
from torch_tiers.migrator.offload.direct import Direct
from torch_tiers.migrator.offload.engine import Engine
from torch_tiers.migrator.planner.sizes import has_room_to_learn
from torch_tiers.migrator.policies import POLICIES
from torch_tiers.migrator.runtime.options import Options
from torch_tiers.migrator.saved.mover import Mover
from torch_tiers.migrator.saved.tensors import HookTensors
from torch_tiers.migrator.streams import Compute, Lane, Memory, OperatorClock
from torch_tiers.migrator.streams.cuda import CudaCompute, CudaLane
from torch_tiers.migrator.streams.host import HostCompute, HostLane
from torch_tiers.migrator.telemetry.counters import Counters

FRAGMENTS = 0.05  # of the budget, on a GPU: what PyTorch's allocator reserves beyond what it allocates
LAYOUTS = 0.02  # the same of ours: layouts had up to 1.3% of the budget in DRAM, where a step takes twice as long
MAY_KEEP = {"auto", "checkpoint", "keep"}  # policies that move nothing, or nothing that may as well stay
RECORDINGS = 3  # of the first iterations on a GPU: in each the host is late somewhere

log = logging.getLogger("tiers")


@dataclass(frozen=True, slots=True)
class Device:
    """What all threads share that train on one device.

    Attributes
    ----------
    budget : int
        HBM that the process may take, in bytes.
    beside : int
        Bytes of it that lie beside PyTorch's allocator: what the direct way takes.
    holes : int
        Bytes of the rest that no plan may count on: segments of PyTorch's allocator that were there before, in use in
        part, as no larger request fits.
    direct : Direct or None
        The way to NVMe past host memory.
    links : Links
        What plans take the lanes to give.
    warned : set of str
        See `Learner`.
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

    @property
    def room(self) -> int:
        """What of the budget is left for the program, in bytes."""
        return self.budget - self.beside


def _margin(device: torch.device, options: Options) -> float:
    """The part of the budget that plans leave free."""
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

    `memory` is who hands out a GPU's, where it is not PyTorch's allocator.

    Raises
    ------
    NoLane
        If the library or the driver that a GPU's need is missing.
    """
    out, back = lanes(device, ("d2h", "h2d"), counters)
    if device.type != "cuda":
        return Device(HostCompute(counters), out, back, budget)
    return Device(CudaCompute(device, counters, lane.load(), memory), out, back, budget)


def lanes(device: torch.device, names: tuple[str, str], counters: Counters) -> tuple[Lane, Lane]:
    """Two lanes of a device, for both directions of a link."""
    if device.type != "cuda":
        return HostLane(names[0], counters), HostLane(names[1], counters)
    library = lane.load()
    return CudaLane(device, names[0], counters, library), CudaLane(device, names[1], counters, library)


@dataclass(slots=True)
class _Loan:
    pages: PageAllocator
    nbytes: int
    borrowers: int = 1  # threads


class Devices:
    """All devices of a runtime, and what they share below HBM. Thread-safe."""

    def __init__(self, counters: Counters) -> None:
        self.opened: dict[torch.device, Device] = {}
        self._counters = counters
        self._backing: Backing | None = None
        self._limited: set[torch.device] = set()  # those on which PyTorch's allocator stays within the budget
        self._short = False  # of room below HBM: what stays may need more than the budget
        self._loans: dict[torch.device, _Loan] = {}  # of HBM beyond the budget, before there are plans
        self._warned_of_lending = False
        self._withheld: dict[torch.device, PageAllocator] = {}  # those that have less than their budget
        self._lock = threading.Lock()  # so that each is made once

    def make_mover(
        self, device: torch.device, options: Options, tensors: HookTensors, operators: OperatorClock | None = None
    ) -> Mover:
        """Make one thread's mover for a device, which is opened if it is the first.

        With `operators`, those are timed one by one where several ranks take part.

        Raises
        ------
        TiersError
            If a tier below HBM cannot be set up as it was configured.
        """
        with self._lock:
            if self._backing is None:
                self._backing = options.backing(self._counters, device.type == "cuda")
                self._backing.at_shortage = self._lift_limits
                if options.policy not in MAY_KEEP:
                    self._backing.say_if_nothing_fits()
            shared = self.opened.get(device) or self._open(device, options)
            shared.compute.operators = operators
        engine = Engine(shared.compute, shared.out, shared.back, self._backing, tensors, shared.direct)
        target = max(0, int(shared.room * (1 - _margin(device, options))) - shared.holes)
        learner = Learner(
            POLICIES[options.policy],
            target,
            shared.links,
            in_background,
            RECORDINGS if device.type == "cuda" else 1,
            # Without a GPU the budget is counted, not enforced; our own allocator goes on in DRAM.
            must_fit=device.type == "cuda" and options.pages() is None,
            budget=shared.room,
            plan_cache=options.plan_cache(device, target),
            warned=shared.warned,
        )
        lent, pages = 0, options.pages() if device.type == "cuda" else None
        keeps = options.policy == "keep"
        if pages is not None and not keeps:
            lent = self._to_lend(device, shared.room, self._backing, options.strict, pages)
        return Mover(engine, learner, shared.room, tensors, keeps=keeps, spills=options.pages() is not None, lent=lent)

    def _to_lend(self, device: torch.device, budget: int, backing: Backing, strict: bool, pages: PageAllocator) -> int:
        """Bytes beyond the budget for the first steps, where a drive would have to take all that they save.

        That took twenty seconds a step of a GPT, and what is free is nobody's yet.
        """
        if strict or not backing.has_disk or has_room_to_learn(backing.dram_capacity, budget):
            return 0
        if device in self._loans:  # another thread's: all of them learn at once
            self._loans[device].borrowers += 1
            return self._loans[device].nbytes
        lent = pages.free_beyond(device)
        if lent and not self._warned_of_lending:
            self._warned_of_lending = True
            log.warning(
                "the first steps may take %s of hbm beyond the budget, which is free, as nvme would be slow: until "
                "there is a plan; hbm.strict = true (TIERS_HBM_STRICT=1) keeps them within it",
                format_size(lent),
            )
        if lent:
            pages.lend(device, lent)
            self._loans[device] = _Loan(pages, lent)
        return lent

    def pay_back(self, device: torch.device) -> None:
        """One more thread needs nothing beyond the budget any longer; with the last one that is taken back."""
        with self._lock:
            loan = self._loans.get(device)
            if loan is not None:
                loan.borrowers -= 1
                if not loan.borrowers:
                    loan.pages.lend(device, 0)
                    del self._loans[device]

    def _open(self, device: torch.device, options: Options) -> Device:
        budget = options.hbm(device)
        pages = options.pages() if device.type == "cuda" else None
        memory = None if pages is None else Memory(pages.peaks(device), off_sequence, partial(pages.tidy, device))
        shared = open_device(device, self._counters, budget, memory)
        if device.type == "cuda" and pages is None:
            shared = replace(shared, holes=holes(device))
        shared = self._with_direct_way(shared, device, options)
        if pages is not None and shared.beside:
            pages.withhold(device, shared.beside)
            self._withheld[device] = pages
        if device.type == "cuda" and options.enforce and not self._short:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, shared.room / total), device)
            self._limited.add(device)
            if self._short:  # for another thread found so since that was asked
                self._lift_limits()
        self.opened[device] = shared
        return shared

    def _with_direct_way(self, shared: Device, device: torch.device, options: Options) -> Device:
        way = options.direct(device)
        if way is None:
            return replace(shared, links=options.links.staged)
        if way.nbytes >= shared.budget:
            way.out.close()
            way.back.close()
            raise TiersError(
                f"the direct way to nvme takes {format_size(way.nbytes)} of {device}, and the budget is "
                f'{format_size(shared.budget)}: raise TIERS_HBM, or set nvme.gds to "off"'
            )
        # What is copied within HBM is counted nowhere: the drives have yet to take it.
        out, back = lanes(device, ("gds_write", "gds_read"), Counters())
        return replace(
            shared,
            direct=Direct(way, out, back, self._counters),
            beside=way.nbytes,
            links=options.links.with_direct_way(way.write, way.read),
        )

    def _lift_limits(self) -> None:
        """Let PyTorch's allocator go beyond the budgets: what finds no room below them would end training."""
        self._short = True
        for device in list(self._limited):
            torch.cuda.set_per_process_memory_fraction(1.0, device)
            self._limited.discard(device)

    def close(self) -> None:
        """Wait for copies and disk requests that are under way; lift the limits that were set.

        Interrupted while it waits for one it goes on with the others.
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
        """The allocator lasts longer than the session."""
        for device, loan in self._loans.items():
            loan.pages.lend(device, 0)
        for device, pages in self._withheld.items():
            pages.withhold(device, 0)
        self._loans.clear()
        self._withheld.clear()


def holes(device: torch.device) -> int:
    """What PyTorch's allocator reserves on a GPU and cannot give back, for blocks that are in use here and there.

    Next to nothing, but where segments of fixed size are there already: a session that opens in the middle of a run.
    """
    if torch.cuda.is_current_stream_capturing():
        return 0  # nothing may be given back now
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def has_tiers(device: torch.device) -> bool:
    """Whether tensors on `device` move: those of GPUs, or of the host where there is no GPU."""
    return device.type == "cuda" or (device.type == "cpu" and not torch.cuda.is_available())


def name_of(device: torch.device) -> str:
    """What reports call it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
