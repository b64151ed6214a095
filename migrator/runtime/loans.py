"""Free HBM beyond the budget, lent to the steps before there is a plan."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from torch_tiers.allocator.pages import PageAllocator
from torch_tiers.allocator.sizes import format_size
from torch_tiers.migrator.offload.backing import Backing
from torch_tiers.migrator.planner.sizes import has_room_to_learn

log = logging.getLogger("tiers")


@dataclass(slots=True)
class _Loan:
    pages: PageAllocator
    nbytes: int
    borrowers: int = 1  # threads


class Loans:
    """What is lent on each GPU. To be used with the lock of `Devices`.

    Before there is a plan a step saves as much as it would without torch-tiers. If DRAM does not hold that, a drive has
    to take it: such steps took twenty seconds for a GPT, while HBM was free.
    """

    def __init__(self) -> None:
        self._loans: dict[torch.device, _Loan] = {}
        self._told: set[str] = set()

    def take(
        self, device: torch.device, budget: int, backing: Backing, pages: PageAllocator | None, *, strict: bool
    ) -> int:
        """Lend the HBM that is free beyond `budget`, in bytes, to one more thread; return how much that is.

        Nothing is lent where DRAM has at least as much room as HBM has free. Nor is it if the budget is `strict`, or
        the allocator is not ours (`pages` is None).
        """
        if not backing.has_disk:
            return 0
        if device in self._loans:  # another thread's: all of them learn at once
            self._loans[device].borrowers += 1
            return self._loans[device].nbytes
        free = 0 if strict or pages is None else pages.free_beyond(device)
        if pages is None or free <= backing.dram_capacity:
            if not has_room_to_learn(backing.dram_capacity, budget) and self._tells("nvme"):
                log.warning(
                    "until there is a plan, steps may offload to nvme and take seconds each; "
                    "more TIERS_DRAM avoids that"
                )
            return 0
        if self._tells("hbm"):
            log.warning(
                "until there is a plan, steps may use %s of free hbm beyond the budget, as offloading to nvme would be "
                "slow; hbm.strict = true (TIERS_HBM_STRICT=1) keeps them within it",
                format_size(free),
            )
        pages.lend(device, free)
        self._loans[device] = _Loan(pages, free)
        return free

    def _tells(self, what: str) -> bool:
        told = what in self._told
        self._told.add(what)
        return not told

    def pay_back(self, device: torch.device) -> None:
        """Take note that one thread no longer needs its loan; end it with the last thread."""
        loan = self._loans.get(device)
        if loan is not None:
            loan.borrowers -= 1
            if not loan.borrowers:
                loan.pages.lend(device, 0)
                del self._loans[device]

    def close(self) -> None:
        """End all loans: the allocator outlives the session."""
        for device, loan in self._loans.items():
            loan.pages.lend(device, 0)
        self._loans.clear()
