"""Blocks: the tensors that one module saved in one call, itself and through its submodules. Pure functions.

Gradient checkpointing recomputes a program in segments, each from what it begins with. Segments here are blocks, as
the paths of saved tensors show them; so a segment never spans two modules unless a third contains both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.planner.effects import obtainable


@dataclass(frozen=True, slots=True)
class Block:
    """A run of sites of one module.

    Attributes
    ----------
    path : str
        The module's.
    first, end : int
        Its sites are ``trace.sites[first:end]``.
    nbytes : int
        Bytes of the storages that these refer to.
    """

    path: str
    first: int
    end: int
    nbytes: int


def blocks(trace: Trace) -> list[Block]:
    """The blocks of a trace, in the order of the program, those around others before them."""
    found: list[Block] = []
    open_: list[tuple[str, int]] = []  # names on the way down to the module of the site before, and since which site
    for number, path in enumerate([*(site.key.rpartition(":")[0] for site in trace.sites), ""]):
        names = path.split(".") if path else []
        same = 0
        while same < min(len(names), len(open_)) and open_[same][0] == names[same]:
            same += 1
        while len(open_) > same:
            whole = ".".join(name for name, _ in open_)
            _, first = open_.pop()
            found.append(Block(whole, first, number, _saved(trace, first, number)))
        open_ += [(name, number) for name in names[same:]]
    return sorted(found, key=lambda block: (block.first, -block.end, len(block.path)))


def _saved(trace: Trace, first: int, end: int) -> int:
    return sum(trace.storage_bytes[ident] for ident in {site.storage for site in trace.sites[first:end]})


def bounds(found: Sequence[Block], most: int) -> list[int]:
    """Bytes that a segment may save at most, for `segments`: of all that tell plans apart at most so many."""
    sizes = sorted({block.nbytes for block in found})
    picked = np.unique(np.linspace(0, len(sizes) - 1, min(most, len(sizes))).astype(int)) if sizes else ()
    return [sizes[int(k)] for k in picked]


def segments(found: Sequence[Block], bound: int) -> Iterator[Block]:
    """The outermost blocks that save at most `bound` bytes, but more than one tensor, in the order of the program."""
    end = 0
    for block in found:
        if block.first >= end and block.nbytes <= bound and block.end > block.first + 1:
            yield block
            end = block.end


def within(trace: Trace, chosen: Sequence[Block]) -> frozenset[int]:
    """What to drop so that each of the chosen segments is recomputed from what it begins with, which is held.

    It begins with what is made of nothing within, or of something that another segment drops.
    """
    owner: dict[int, int] = {}  # of each storage the segment that saved it first, below 0 if that is none
    at = 0
    for number, site in enumerate(trace.sites):
        while at < len(chosen) and chosen[at].end <= number:
            at += 1
        is_in_one = at < len(chosen) and chosen[at].first <= number
        owner.setdefault(site.storage, at if is_in_one else -1)
    dropped = set[int]()
    for ident, segment in owner.items():
        recipe = trace.recipes.get(ident)
        if segment < 0 or recipe is None or not trace.storage_bytes[ident]:
            continue
        inside = [owner[source] == segment for source in recipe.inputs]
        from_others = any(source in dropped for source, own in zip(recipe.inputs, inside, strict=True) if not own)
        if not from_others and (any(inside) or not inside):
            dropped.add(ident)
    return obtainable(trace, dropped)
