"""What is left of a link while cores load the memory bus."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch_tiers.allocator.errors import TiersError
from torch_tiers.probe.affinity import on_cores
from torch_tiers.probe.load import BYTES_PER_WORKER, HostLoad
from torch_tiers.probe.measure import ProbePath, prepared, repeat
from torch_tiers.probe.results import LoadedSample, PathResult
from torch_tiers.topology import read_memory

_SETTLING = 0.1  # seconds until the workers have heard of it and run
_OWN_TRAFFIC = ("memcpy", "memcpy.all_cores")


def levels(cores: int) -> list[int]:
    """Count the workers from none to `cores`, doubling."""
    counts = [0]
    while (step := max(1, counts[-1] * 2)) < cores:
        counts.append(step)
    return [*counts, cores]


def workers_that_fit() -> int:
    """Every core this process may use, unless memory for that many is short."""
    return max(min(len(os.sched_getaffinity(0)), read_memory().available // 4 // BYTES_PER_WORKER), 1)


def under_load(
    paths: Sequence[ProbePath],
    results: Sequence[PathResult],
    largest: int,
    workers: int,
    seconds: float,
    on_path: Callable[[str], None] = lambda label: None,
) -> list[PathResult]:
    """Measure each path that `results` found to work again, at every level of load.

    Parameters
    ----------
    largest
        Bound on the size of a copy: the largest within it that the path was measured with counts.
    seconds
        For all of it together, about.

    Returns
    -------
    list[PathResult]
        `results`, with `loaded` filled in; a path that fails now has failed.
    """
    chosen = [
        result.status == "measured"
        and result.path.kind not in _OWN_TRAFFIC
        and any(sample.size <= largest for sample in result.samples)
        for result in results
    ]
    counts = levels(workers)
    share = seconds / max(sum(chosen) * len(counts), 1)
    found = []
    with HostLoad(workers, frozenset(os.sched_getaffinity(0))) as load:
        for probe, result, wanted in zip(paths, results, chosen, strict=True):
            if not wanted:
                found.append(result)
                continue
            on_path(probe.path.label)
            size = max(sample.size for sample in result.samples if sample.size <= largest)
            try:
                loaded = _load(probe, size, load, counts, share)
                found.append(replace(result, loaded=tuple(loaded)))
            except (TiersError, RuntimeError) as error:
                found.append(replace(result, status="failed", reason=f"under load: {error}"))
            finally:
                load.set(0)
    return found


def _load(probe: ProbePath, size: int, load: HostLoad, counts: Sequence[int], seconds: float) -> list[LoadedSample]:
    found = []
    with on_cores(probe.cores), prepared(probe, size, verify=False):
        for count in counts:
            load.set(count)
            time.sleep(_SETTLING)
            before, start = load.copied(), time.perf_counter()
            sample = repeat(probe, size, None, max(seconds - _SETTLING, 0))
            copied = (load.copied() - before) / (time.perf_counter() - start)
            found.append(LoadedSample(count, 2 * copied, sample.bandwidth))
    return found
