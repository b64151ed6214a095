"""Traces for tests: drawn at random, or of a chain of layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from hypothesis import strategies as st

from torch_tiers.allocator.sizes import KiB, MiB
from torch_tiers.migrator.model.trace import Recipe, Site, Trace


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


@st.composite
def programs(draw: st.DrawFn) -> Trace:
    """Layers with times, recipes and memory of their own; backward takes them in reverse, and saves, too.

    A layer saves its input and an output that can be made from that, which the next layer may save once more.
    """
    layers = draw(st.integers(1, 12))
    sizes = st.sampled_from([4 * KiB, MiB - 1, 3 * MiB, 40 * MiB, 300 * MiB])
    seconds = st.sampled_from([0.0, 1e-5, 1e-3, 20e-3])
    saves: list[tuple[str, int]] = []
    nbytes: list[int] = []
    recipes: dict[int, Recipe] = {}
    for layer in range(layers):
        source = len(nbytes) - 1 if layer and draw(st.booleans()) else len(nbytes)
        if source == len(nbytes):
            nbytes.append(draw(sizes))
        saves.append((f"layer{layer}:0", source))
        if draw(st.booleans()):
            made = len(nbytes)
            nbytes.append(draw(sizes))
            recipes[made] = Recipe("Op", (source,), draw(seconds), draw(st.sampled_from([0, 5 * MiB])))
            saves.append((f"layer{layer}:1", made))
    last = 2 * len(saves) - 1
    sites = tuple(Site(key, at, nbytes[at], k, (last - k,)) for k, (key, at) in enumerate(saves))
    if draw(st.booleans()):  # as the program's own checkpoints do
        nbytes.append(draw(sizes))
        sites = (*sites, Site("again:0", len(nbytes) - 1, nbytes[-1], last + 1, (last + 2,)))
        last += 2
    gaps = draw(st.lists(seconds, min_size=last + 2, max_size=last + 2))
    clock = tuple(accumulate(gaps))
    others = draw(st.lists(st.integers(0, 500).map(lambda n: n * MiB), min_size=last + 2, max_size=last + 2))
    held = draw(st.dictionaries(st.integers(0, len(nbytes) - 1), st.integers(0, last + 1), max_size=3))
    return Trace(sites, last + 1, clock[:-1], clock[-1], tuple(others), recipes, held)
