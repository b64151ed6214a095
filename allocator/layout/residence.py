"""Demotes optimizer state and weights of one GPU to DRAM, and promotes them to HBM, between two steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from torch_tiers.allocator.host.claims import DramClaims
from torch_tiers.allocator.layout.demotion import Resident, demote_or_promote
from torch_tiers.allocator.native import DRAM, HBM, STATE, USED, Core, CoreBusy, CoreError, CoreFull
from torch_tiers.allocator.sizes import PAGE, GiB

log = logging.getLogger("tiers")

PATIENCE = 8  # periods with something in DRAM before state is demoted: a migrator needs less by then, if it can


class Residence:
    """The tiers that state and weights lie in.

    Parameters
    ----------
    device : int
        Number of the GPU.
    core : Core
        Its pages and blocks.
    claims : DramClaims
        Where DRAM is claimed before it is taken.

    Attributes
    ----------
    overflow : int
        Bytes for which the last period had no room in HBM: what lay in DRAM, without state and weights.
    spilled : bool
        Whether there was more in DRAM than weights: kernels read that over the link that the migrator uses.
    weights : callable
        Returns the weights that may lie in DRAM, as they are streamed from there: bytes by address.
    """

    def __init__(self, device: int, core: Core, claims: DramClaims) -> None:
        self.overflow = 0
        self.weights: Callable[[], Mapping[int, int]] = dict
        self._device = device
        self._core = core
        self._claims = claims
        self._periods = 0  # in a row that had something in DRAM
        self.spilled = False

    def forget(self) -> None:
        """Take note that plans change: the periods before them say nothing of those to come."""
        self._periods = 0

    def in_dram(self, address: int) -> bool:
        """Whether a block, or a part of it, lies in DRAM."""
        return self._core.on(address, DRAM) > 0

    def place(self, demote: Iterable[int], promote: Iterable[int]) -> None:
        """Demote these blocks and promote those, by address, as far as there is room. Not within a step."""
        for tier, addresses in ((DRAM, demote), (HBM, promote)):
            for address in addresses:
                if self._core.on(address, HBM if tier == DRAM else DRAM) and not self._move(address, tier):
                    break

    def period_over(self, dram: int, *, alone: bool) -> bool:
        """Demote to make room in HBM for the `dram` bytes in DRAM, or promote; whether anything was demoted.

        What is promoted goes where nothing lies, so the layout stays as it is: another one takes up to half a second.
        """
        self._periods = self._periods + 1 if dram else 0
        self.overflow, self.spilled = 0, False
        if not dram:
            return False
        core = self._core
        weights = [Resident(each, nbytes, core.on(each, DRAM), True) for each, nbytes in self.weights().items()]
        dram -= sum(weight.in_dram for weight in weights)
        self.overflow, self.spilled = max(0, dram - core.glance().dram_state), dram > 0
        if self._periods < PATIENCE or not alone:
            return False
        blocks = core.blocks()
        # Smaller ones are many and have few bytes. They move with those that they share a page with, as all of a page
        # does, whatever its size.
        blocks = blocks[(blocks["class"] == STATE) & (blocks["kind"] == USED) & (blocks["bytes"] >= 2 * PAGE)]
        state = [Resident(int(b["address"]), int(b["bytes"]), core.on(int(b["address"]), DRAM)) for b in blocks]
        counts = core.counts()
        spare = counts.hbm_limit - counts.hbm  # what is mapped is needed again
        demote, promote = demote_or_promote(
            state + weights, short=self.overflow, spare=spare, budget=counts.hbm_limit, page=core.page_bytes
        )
        moved = 0
        for tier, addresses in ((DRAM, demote), (HBM, promote)):
            for address in addresses:
                if not self._move(address, tier):
                    break
                moved += 1
        if moved:
            text = "%d blocks of state and weights now lie in %s, to keep in hbm what is used more"
            log.info(text, moved, "dram" if demote else "hbm")
        return bool(moved and demote)

    def _move(self, address: int, tier: int) -> bool:
        """Put a block on a tier, claiming DRAM for it as long as there is some; whether all of it lies there."""
        while True:
            try:
                self._core.move(address, tier)
                return True
            except CoreBusy:
                return False
            except CoreFull:
                # The program is not out of memory without it: between two periods, all that it needs lies idle.
                if tier == HBM or not self._claims.more(self._device, self._core, GiB):
                    return False
            except CoreError as error:  # it lies where it lay
                log.warning("state or weights stay where they are on cuda:%d: %s", self._device, error)
                return False
