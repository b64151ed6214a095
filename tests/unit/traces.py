"""Traces for tests: drawn at random, or of a chain of layers."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from allocator.sizes import KiB, MiB
from migrator.trace import Site, Trace


def chain(sizes: Sequence[int], name: str = "layer") -> Trace:
    """One site per layer and storage; backward asks for them in reverse."""
    last = 2 * len(sizes) - 1
    sites = (Site(f"{name}{k}:0", k, nbytes, k, (last - k,)) for k, nbytes in enumerate(sizes))
    return Trace(tuple(sites), 2 * len(sizes))


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Storages shared by several sites, some that cannot move; sites used never, once or twice, in any order."""
    sizes = draw(st.lists(st.sampled_from([0, 4 * KiB, MiB - 1, 3 * MiB, 40 * MiB, 300 * MiB]), max_size=12))
    on = draw(st.lists(st.integers(0, len(sizes) - 1), max_size=20)) if sizes else []
    uses: list[list[int]] = [[] for _ in on]
    position = len(on)
    for site in draw(st.lists(st.sampled_from(range(len(on))), max_size=24)) if on else []:
        uses[site].append(position)
        position += 1
    sites = (Site(f"m{k % 3}:{k}", at, sizes[at], k, tuple(uses[k])) for k, at in enumerate(on))
    return Trace(tuple(sites), position)
