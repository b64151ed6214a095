"""Sizes by rule: how many bytes stay in HBM, form a group, and are under way."""

from __future__ import annotations

from torch_tiers.allocator.sizes import PAGE, GiB, MiB
from torch_tiers.migrator.model.trace import Trace

LARGEST_GROUP = 192 * MiB  # 16 run at the link's full speed; but to offload a group takes the host 60 to 300 us
WORTH = 16 * MiB  # of a smaller group the copies' overheads show: 2% of the link, and 400 us of the host's time
GROUPS_AHEAD = 2  # one group on the link and one behind it keep the link busy


def least_room(trace: Trace, budget: int) -> int:
    """Saved bytes that `budget` has room for at every position of the iteration."""
    return max(0, budget - max(trace.others, default=0))


def group_bytes(room: int) -> int:
    """Size of a page group under `room` bytes: a sixteenth of it, between a page and 192 MiB."""
    return min(LARGEST_GROUP, max(PAGE, room // 16))


def learning_room(budget: int, beside: int | None = None) -> int:
    """Saved bytes that may lie in HBM before there is a plan: an eighth of the budget, 1 GiB at most.

    Of a program that may fit, by what `beside` saved bytes lies in HBM at most, it is all else but an eighth. In that
    replays are tried.
    """
    least = min(GiB, budget // 8)
    return least if beside is None else max(least, budget - budget // 8 - beside)


def has_room_to_learn(dram: int, budget: int) -> bool:
    """Whether so much DRAM takes what a program may need beyond its budget before there is a plan."""
    return dram >= budget // 4


def unseen(budget: int, static: int) -> int:
    """What may lie in HBM besides saved tensors, of a program of which but the static bytes are known."""
    return static + max(0, budget - static) // 4


def look_ahead(largest: int, room: int) -> int:
    """Bytes of HBM, out of `room`, for groups under way, when the largest storage that moves has `largest` bytes."""
    return GROUPS_AHEAD * max(largest, group_bytes(room)) if largest else 0
