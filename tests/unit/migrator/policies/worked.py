"""Small traces to work through by hand: one storage per layer, sizes in MiB, lanes of 1 MiB a second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch_tiers.allocator.sizes import MiB
from torch_tiers.migrator.model.links import Links
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.trace import Recipe, Site, Trace

LINKS = Links(d2h=MiB, h2d=MiB, both=2 * MiB, latency=0.0)


def worked(
    sizes: Sequence[int],
    *,
    forward: Sequence[float] | float = 1.0,
    backward: Sequence[float] | float = 2.0,
    kinds: Sequence[str] | None = None,
    recipes: Mapping[int, Recipe] | None = None,
) -> Trace:
    """Layer `k` runs for ``forward[k]`` and then saves storage `k`; ``backward[k]`` follows its only use."""
    count = len(sizes)
    ahead = [forward] * count if isinstance(forward, float) else list(forward)
    back = [backward] * count if isinstance(backward, float) else list(backward)
    now, times = 0.0, []
    for seconds in ahead:
        now += seconds
        times.append(now)
    for seconds in reversed(back):
        times.append(now)
        now += seconds
    sites = tuple(
        Site(f"{chr(97 + k)}:0", k, size * MiB, k, (2 * count - 1 - k,), kinds[k] if kinds else "Linear")
        for k, size in enumerate(sizes)
    )
    return Trace(sites, 2 * count, tuple(times), now, (), recipes or {})


def moves(plan: Plan) -> dict[str, int | None]:
    """Layers whose storage moves, in the order in which they come back, and from which position on."""
    return {site.removesuffix(":0"): group.bring_at for group in plan.groups for site in group.sites}


def remade(plan: Plan) -> list[str]:
    """Layers whose storage is recomputed."""
    return [site.removesuffix(":0") for site in plan.recompute]
