"""Page groups: which storages (of saved tensors) move together.

Storages that die one after the other share a group, so that a group is needed, and dies, as a whole (Sentinel, HPCA'21:
tensors of one lifetime share pages). For the migrator. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch_tiers.allocator.layout.lifetimes import Lifetime


def group_by_death(lifetimes: Iterable[Lifetime], group_bytes: int) -> list[tuple[Lifetime, ...]]:
    """Cut storages, in the order of their deaths, into groups of at most `group_bytes`.

    A storage larger than `group_bytes` is a group of its own. A storage that is never used again
    shares a group only with its like: a group that is needed must not carry bytes that are not.

    Parameters
    ----------
    lifetimes : iterable of Lifetime
        What moves, in any order.
    group_bytes : int
        Upper bound of a group, in bytes. Large enough for the link's full speed (16 MiB on PCIe
        Gen5), small enough that little waits for the group's last member.

    Returns
    -------
    list of tuple of Lifetime
        Groups in the order in which they are needed; those that never are come last.
    """
    groups: list[list[Lifetime]] = []
    filled = 0
    for life in sorted(lifetimes, key=lambda life: (not life.uses, life.death, -life.birth)):
        fits = groups and filled + life.nbytes <= group_bytes and bool(groups[-1][-1].uses) == bool(life.uses)
        if not fits:
            groups.append([])
            filled = 0
        groups[-1].append(life)
        filled += life.nbytes
    return [tuple(group) for group in groups]
