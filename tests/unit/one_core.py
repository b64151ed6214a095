"""The page allocator on a core without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from torch_tiers.allocator.host.ledger import Ledger
from torch_tiers.allocator.host.room import Room
from torch_tiers.allocator.layout.periods import Periods
from torch_tiers.allocator.native import Core
from torch_tiers.allocator.pages import PageAllocator


class OnOneCore(PageAllocator):
    """On a core of anonymous files in place of PyTorch's GPUs."""

    def __init__(
        self, core: Core, dram: int = 0, ledger: Ledger | None = None, room: Callable[[], Room] | None = None
    ) -> None:
        super().__init__(Path(), core.counts().hbm_limit, dram, ledger and ledger.open_account("dram", dram), room)
        self.core, self.claims = core, self._claims
        self._known[0] = Periods(0, core, self._claims)

    def more(self, nbytes: int) -> bool:
        """Claim DRAM for what can do without it."""
        return self.claims.more(0, self.core, nbytes)

    def _all(self) -> Iterator[tuple[int, Periods]]:
        yield 0, self._known[0]


def step(core: Core, *sizes: int) -> None:
    for address in [core.allocate(size) for size in sizes]:
        core.free(address)
