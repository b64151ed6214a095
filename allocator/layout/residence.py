"""Demotes optimizer state and weights of one GPU to DRAM, and promotes them to HBM, between two steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby

from torch_tiers.allocator.host.claims import DramClaims
from torch_tiers.allocator.layout.demotion import Resident, demote_or_promote
from torch_tiers.allocator.native import DRAM, HBM, STATE, USED, Core, CoreBusy, CoreError, CoreFull
from torch_tiers.allocator.sizes import PAGE, GiB, round_up

log = logging.getLogger("tiers")

AGAIN = 2  # periods in a row for which HBM had no room: what happens once in a while is worth no new plans
RARELY = 64  # periods between two looks for what to promote, where they are in vain
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
        The most bytes for which the last period had no room in HBM, wherever they came to lie.
    spilled : bool
        Whether kernels read more in DRAM than weights, over the link that the migrator uses.
    state : int
        Bytes of optimizer state, in whole pages, that lay in DRAM when the last period ended.
    in_place : int
        Bytes of that which optimizers read and write there, over the link: all but what is streamed.
    """

    def __init__(self, device: int, core: Core, claims: DramClaims) -> None:
        self.overflow = self.state = self.in_place = 0
        self._streamed: dict[int, int] = {}  # bytes by address: in the present period
        self._last_streamed = 0  # bytes: in the last period that streamed any
        self._weights: Callable[[], Mapping[int, int]] = dict
        self._device = device
        self._core = core
        self._claims = claims
        self.spilled = False
        # Periods in a row with anything in DRAM, those with an overflow, and forwards.
        self._periods = self._overflows = self._passes = 0
        self._promoted = False  # whether what moved last was promoted
        self._patience = PATIENCE  # periods before more is promoted: twice as many each time that it was in vain

    def forget(self) -> None:
        """Take note that plans change: the periods before them say nothing of those to come."""
        self._periods = self._overflows = 0
        self._patience = PATIENCE

    @property
    def is_short(self) -> bool:
        """Whether HBM had no room for several periods in a row, the last one included."""
        return self._overflows >= AGAIN

    def dram_bytes(self, address: int) -> int:
        """Bytes of a block that lie in DRAM."""
        return self._core.on(address, DRAM)

    def in_dram(self, address: int) -> bool:
        """Whether a block, or a part of it, lies in DRAM."""
        return self.dram_bytes(address) > 0

    def longest_in_hbm(self, address: int, nbytes: int) -> tuple[int, int]:
        """The longest run of a block's bytes that lies in HBM: its first byte in the block, and its length.

        In whole pages, unless all of the block lies there.
        """
        if not self.in_dram(address):
            return 0, nbytes
        page = self._core.page_bytes
        pages = range(round_up(address, page), (address + nbytes) // page * page, page)
        runs = groupby(pages, key=lambda at: self._core.pages_on(at, page, DRAM) == 0)
        longest = max((list(run) for in_hbm, run in runs if in_hbm), key=len, default=[])
        return (longest[0] - address, page * len(longest)) if longest else (0, 0)

    def note_streamed(self, nbytes: Mapping[int, int]) -> None:
        """Take note that these blocks of state came to HBM for updates, in the period; by address, bytes in DRAM."""
        self._streamed.update(nbytes)

    def set_weights(self, weights: Callable[[], Mapping[int, int]]) -> None:
        """From now on these weights may lie in DRAM: `weights` returns bytes by address."""
        self._weights = weights
        # The first one tells what else needs room. Passes are looked at before they begin.
        self._periods, self._passes, self._patience = PATIENCE - 1, PATIENCE - 2, PATIENCE

    def place(self, demote: Iterable[int], promote: Iterable[int]) -> None:
        """Demote these blocks and promote those, by address, as far as there is room. Not within a step."""
        for address in demote:
            # Also what lies there already: it is to be known that it needs no HBM.
            if (self.in_dram(address) or self._core.on(address, HBM)) and not self._move(address, DRAM):
                break
        for address in promote:
            if self.in_dram(address) and not self._move(address, HBM):
                break

    def make_room(self, nbytes: int) -> int:
        """Demote state at once, as HBM lacks so many bytes, not within a forward or a backward.

        Returns
        -------
        int
            Bytes that HBM lacks yet.
        """
        before = self._core.counts().demoted
        self._move_some({}, nbytes)
        self.count_state()
        return max(0, nbytes - (self._core.counts().demoted - before))

    def demotable(self) -> int:
        """The bytes of state in HBM that `make_room` may demote."""
        return sum(block.nbytes - block.in_dram for block in self._state_residents())

    def state_blocks(self) -> set[int]:
        """The addresses of all state."""
        blocks = self._core.blocks()
        return set(blocks["address"][blocks["class"] == STATE].tolist())

    def count_state(self) -> None:
        """Take note of state that has come to lie in DRAM within a period."""
        self.state = int(self._core.glance().dram_state)

    def is_due(self, dram: int, spilled: int) -> bool:
        """Whether `period_over` will look for what to promote, after a period with so many bytes in DRAM."""
        return dram > 0 and not spilled and self._periods + 1 >= self._patience

    def period_over(self, spilled: int, *, alone: bool, planning: bool = False) -> bool:
        """Demote to make room in HBM for the bytes that `spilled` in the period, or promote; whether any was demoted.

        What is promoted goes where nothing lies, so the layout stays as it is: another one takes up to half a second.
        """
        glance = self._core.glance()
        self.overflow, self.state = spilled, int(glance.dram_state)
        if self._streamed:  # else there may have been no step, as a scaler refuses some
            self._last_streamed, self._streamed = sum(self._streamed.values()), {}
        self.in_place = max(0, self.state - self._last_streamed)
        self.spilled = (spilled > 0 and glance.dram > 0) or self.in_place > 0
        self._periods = self._periods + 1 if glance.dram else 0
        self._overflows = self._overflows + 1 if spilled else 0
        if not alone:
            return False
        if not spilled:
            if self._periods >= self._patience and not self._move_some(self._weights(), 0):
                # In vain: look more rarely, as room may come all the same.
                self._patience = max(self._patience, min(2 * self._patience, RARELY))
            return False
        weights = self._weights()
        # Where weights are streamed no migrator needs less later on: what else lies in DRAM is read over the link, and
        # that takes tens of times as long. So does mapping pages anew.
        due = bool(weights) or (self._overflows >= PATIENCE and not planning)
        return due and self._move_some(weights, spilled)

    def pass_over(self) -> None:
        """Demote or promote weights between two forwards of a program that does not train, and so has no periods."""
        self._passes += 1
        glance = self._core.glance()
        if self._passes % PATIENCE == 0 and glance.dram:
            self._move_some(self._weights(), glance.spilled_so_far)

    def _state_residents(self) -> list[Resident]:
        """The blocks of state of two pages or more, with their bytes in DRAM.

        Smaller blocks are many and have few bytes. They move with the page that they lie on.
        """
        blocks = self._core.blocks()
        blocks = blocks[(blocks["class"] == STATE) & (blocks["kind"] == USED) & (blocks["bytes"] >= 2 * PAGE)]
        return [Resident(int(b["address"]), int(b["bytes"]), self._core.on(int(b["address"]), DRAM)) for b in blocks]

    def _residents(self, weights: Mapping[int, int]) -> list[Resident]:
        """By how much these lie in DRAM, and may: their whole pages."""
        core, page, found = self._core, self._core.page_bytes, []
        for address, nbytes in weights.items():
            first = round_up(address, page)
            whole = (address + nbytes) // page * page - first
            if whole > 0:
                found.append(Resident(address, whole, core.pages_on(first, whole, DRAM), True))
        return found

    def _move_some(self, weights: Mapping[int, int], short: int) -> bool:
        core, state = self._core, self._state_residents()
        counts = core.counts()
        spare = counts.hbm_limit - counts.hbm  # what is mapped is needed again
        demote, promote = demote_or_promote(
            state + self._residents(weights), short=short, spare=spare, budget=counts.hbm_limit, page=core.page_bytes
        )
        moved = 0
        for tier, addresses in ((DRAM, demote), (HBM, promote)):
            for address in addresses:
                if not self._move(address, tier):
                    break
                moved += 1
        if moved:
            if demote and self._promoted:
                self._patience *= 2
                self._periods = 0
            self._promoted = not demote
            text = "%d blocks of state and weights now lie in %s, to keep in hbm what is used more"
            log.info(text, moved, "dram" if demote else "hbm")
        else:
            self._periods = 0  # to look takes a millisecond or more, in which the device is idle: not in every period
        return moved > 0

    def _move(self, address: int, tier: int) -> bool:
        """Put a block on a tier, claiming DRAM for it as long as there is some; whether all of it lies there.

        The core waits for all streams. While the block moves it is mapped nowhere, and none of Python's threads runs.
        One that is within compiled code, without the interpreter's lock, may not launch what reads the block.
        """
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
