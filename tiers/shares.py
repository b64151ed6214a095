"""What this process may take: HBM budgets, its share of the node's `dram` and `nvme`, and what the machine leaves."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_tiers.allocator.holders import Claims
from torch_tiers.allocator.host.ledger import Account, Ledger
from torch_tiers.allocator.host.room import Room
from torch_tiers.allocator.sizes import PAGE, GiB, MiB, Share, format_at_least, format_size
from torch_tiers.config import Config, ConfigError
from torch_tiers.launcher import processes
from torch_tiers.places import LEDGERS, of_user
from torch_tiers.topology import default_dram_capacity, filesystem_of, memory_left, numa_node, read_memory

log = logging.getLogger("tiers")

MARGIN = 512 * MiB  # of HBM that is left to others when no budget is set


class Shares:
    """Budgets and capacities of one process.

    The capacities of `dram` and `nvme` are the node's: its processes share them through a ledger, first come,
    first served, so a rank that needs more than another may have it. Without a ledger each takes an equal share.

    Attributes
    ----------
    ledger : Ledger or None
        Where the processes of this node meet.
    dram, nvme : int
        The most that this process may take, in bytes.
    ranks : int
        Processes of this job on this node.
    claims : Claims
        What this process meets as it claims `dram`.

    Raises
    ------
    ConfigError
        If the ledger that was named cannot be used.
    """

    def __init__(self, config: Config) -> None:
        self.ledger = _open_ledger(config)
        self.ranks = processes("LOCAL_WORLD_SIZE")
        parts = 1 if self.ledger else self.ranks
        self.claims = Claims()
        self._hbm = config.hbm.capacity
        self._settled: dict[torch.device, int] = {}  # by device: the budget, if it is a share of what is needed
        self.dram = (self._default_dram() if config.dram.capacity is None else config.dram.capacity) // parts
        self.nvme = (config.nvme.capacity or 0) // parts if config.nvme.paths else 0

    def hbm(self, device: torch.device) -> int:
        """The HBM budget of a device, in bytes: all that is free where none is set, or not known yet."""
        if device in self._settled:
            return self._settled[device]
        if isinstance(self._hbm, int):
            return self._hbm
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            return free + torch.cuda.memory_reserved(device) - MARGIN
        return read_memory().room

    def has_budget(self, device: torch.device) -> bool:
        """Whether a device's budget is known: one was set, and is no share of what is yet to be learned."""
        return isinstance(self._hbm, int) or device in self._settled

    @property
    def of_need(self) -> str | None:
        """Which share of what an iteration needs the budget is, such as ``60%``; None if it is none, or none yet."""
        return str(self._hbm) if self._settled else None

    def settle(self, device: torch.device, needed: int, most: int) -> int:
        """Make a device's HBM budget a share of what an iteration needs there with everything kept, and return it.

        All in bytes. Where that is more than `most`, which the device has, the budget is that.
        """
        assert isinstance(self._hbm, Share)
        share = self._hbm.of(needed)
        budget = self._settled[device] = min(share, most)
        text = "an iteration needs %s of hbm on %s with everything kept, so the budget is %s from now on (%s of that%s)"
        all_of_it = "" if share <= most else ", which is more than there is"
        log.info(text, format_at_least(needed), device, format_size(budget), self._hbm, all_of_it)
        return budget

    def account(self, tier: str, capacity: int) -> Account | None:
        """Where what is taken of a tier is claimed; None without a ledger."""
        claims = self.claims if tier == "dram" else None
        return self.ledger.open_account(tier, capacity, claims) if self.ledger else None

    def say_if_alone(self) -> None:
        """Say that nothing is shared, where there is no ledger."""
        if self.ledger is None:
            text = (
                "no ledger can be kept in %s, so dram and nvme are this rank's alone: 1/%d of the capacities; name a "
                "directory of this user's, the same for all ranks of the node, in TIERS_LEDGER"
            )
            log.warning(text, " or ".join(map(str, LEDGERS)), self.ranks)

    def say_if_without_effect(self, *, trained: bool) -> None:
        """Say that there was no budget, where it is a share of what nobody came to know though the program trained."""
        if trained and isinstance(self._hbm, Share) and not self._settled:
            text = (
                "hbm.capacity = %s had no effect: what an iteration needs is known with the first plan after a step of "
                "an optimizer of torch.optim; run more steps, or set bytes"
            )
            log.warning(text, self._hbm)

    def _default_dram(self) -> int:
        # The ledger subtracts what other processes hold, which is missing from what the system has available.
        held = 0
        if self.ledger is not None:
            with contextlib.suppress(OSError):  # said at the first claim
                held = self.ledger.used("dram")
        return default_dram_capacity(read_memory()) + held // 2


def step(capacity: int) -> int:
    """Bytes to grow a tier by: little enough that one rank's first step leaves room for the others'."""
    return max(PAGE, min(GiB, capacity // 16))


def room() -> Room:
    """What the machine and the cgroup leave now."""
    return Room(*memory_left(read_memory()))


def rooms_in_memory(paths: Sequence[Path]) -> dict[Path, Callable[[], Room]]:
    """For each of `paths` where what is written stays in memory: what tells how much of that is left."""
    return {path: room for path in paths if filesystem_of(path).in_memory}


def node_of_gpu() -> int | None:
    """The NUMA node that the current GPU is attached to, if that is known."""
    gpu: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    try:
        return numa_node(f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0")
    except AttributeError:  # an older PyTorch
        return None


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
        # One that is there and busy is the one where all others meet: elsewhere what they hold would count for nothing.
        with contextlib.suppress(OSError):  # said where it matters, when something is about to be shared
            return Ledger(of_user(place))
    return None
