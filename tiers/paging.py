"""Which allocator PyTorch has on a GPU: ours, put there when the program first uses CUDA, or its own."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

import torch

from torch_tiers.allocator.host.ledger import Account
from torch_tiers.allocator.native import Counts
from torch_tiers.allocator.native.pytorch import adapter
from torch_tiers.allocator.native.pytorch.adapter import NoAdapter
from torch_tiers.allocator.pages import PageAllocator
from torch_tiers.allocator.sizes import format_size
from torch_tiers.config_keys import ConfigError
from torch_tiers.places import cache_directory
from torch_tiers.shares import room

log = logging.getLogger("tiers")

_installed: PageAllocator | None = None  # once it is under PyTorch it stays there, whatever becomes of the session
_hbm: int | None = None  # its budget; 0 for all that is free


def installed() -> PageAllocator | None:
    """The page-grouping allocator, if it is under PyTorch."""
    return _installed


def install(hbm: int, dram: int, account: Account | None) -> None:
    """Put the page-grouping allocator under PyTorch, if it is not there yet.

    Parameters
    ----------
    hbm, dram
        Its capacities, in bytes; 0 for `hbm` is all that is free.
    account
        Where the `dram` that it takes is claimed.

    Raises
    ------
    TiersError
        If this machine or this PyTorch does not allow it.
    """
    global _installed, _hbm
    if _installed is None:
        if torch.cuda.is_initialized():  # known before half a minute goes into building
            raise NoAdapter(
                "PyTorch takes no allocator once the program has used CUDA: open the session earlier, or start the "
                "program by tiers run"
            )
        pages = PageAllocator(adapter.build(cache_directory()), hbm, dram, account, room)
        pages.install()
        _installed, _hbm = pages, hbm


def check_budget(capacity: int | None) -> None:
    """Refuse a larger budget than the allocator has that is under PyTorch: nothing would give it more.

    Raises
    ------
    ConfigError
        If `capacity` is larger.
    """
    if not _hbm or capacity is None or capacity <= _hbm:
        return
    raise ConfigError(
        f"hbm.capacity is {format_size(capacity)}, and our allocator, which lasts as long as the process, was given "
        f"{format_size(_hbm)}: ask for no more than that, or start another process"
    )


def before_cuda(install: Callable[[], None]) -> None:
    """Have `install` called when the program is about to initialise CUDA: too early would make a context for it."""
    if not torch.version.cuda:
        log.warning("there is no GPU: memory is only counted, as with TIERS_ALLOCATOR=torch")
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


def account(cores: Sequence[Counts]) -> dict[str, int]:
    """What our allocator did so far, on all GPUs: why a step took long that waited for no lane.

    Pages mapped and unmapped, which takes some 60 us each, and waits for the device for that; requests that lay where
    the layout has them, that it does not know, and whose place was taken; bytes that lie in DRAM now.
    """
    names = ("maps", "unmaps", "waits", "planned", "mispredicted", "misplaced", "dram")
    return {name: sum(getattr(counts, name) for counts in cores) for name in names}


def prefer_expandable_segments() -> None:
    """Have PyTorch's own allocator grow its segments in place, unless the user has configured it himself.

    With segments of fixed size, what groups leave behind is in holes that no larger request fits into: the
    reference GPT then ran out of memory 1.8 GiB below its budget; with this, reserved is at most 1.08 of allocated.
    """
    if torch.version.cuda and not any(
        os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    ):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
