"""How a path is measured: warmed up, checked, run several times within its share of the time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from torch_tiers.allocator.errors import TierFull, TiersError
from torch_tiers.allocator.sizes import KiB, MiB, format_size
from torch_tiers.probe.affinity import on_cores
from torch_tiers.probe.results import Path, PathResult, Sample

log = logging.getLogger("tiers")

SIZES = tuple(4 * KiB * 4**step for step in range(10))
QUICK_SIZES = (64 * KiB, MiB, 16 * MiB, 64 * MiB)
SUSTAINED_SIZE = 16 * MiB

_QUEUED = 64 * MiB
_MOST_COPIES = 32  # a stream takes about a thousand commands before queueing blocks; this stays far below
_RUNS_PER_SIZE = 4  # making the data, warming up, checking, and one run that counts


class Waived(TiersError):
    """A path cannot run here; the text is the reason."""


@dataclass(frozen=True, slots=True)
class Run:
    """What was moved, and in how many seconds."""

    nbytes: int
    seconds: float


class ProbePath(Protocol):
    """A path that can be measured. `prepare`, any number of runs, `release`; then the next size."""

    path: Path
    cores: frozenset[int]
    """Where to measure it from."""

    def why_not(self) -> str | None:
        """Say why it cannot run here, or return None."""

    def prepare(self, size: int) -> None:
        """Make memory and files for copies of `size`. Waived or TierFull if that cannot be had."""

    def run(self, size: int) -> Run:
        """Make ``copies(size)`` copies, queued together."""

    def intact(self) -> bool:
        """Whether the last run moved what it was given; the next run is as good as the last."""

    def release(self) -> None:
        """Give back what `prepare` took, as far as it came."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to measure.

    Attributes
    ----------
    sizes
        Bytes of one copy, ascending.
    samples
        Runs per size; None is as many as the time allows, of which the first half is dropped, because a
        drive's cache takes it.
    verify
        Check the data at every size.
    """

    sizes: tuple[int, ...] = SIZES
    samples: int | None = 7
    verify: bool = True


def copies(size: int) -> int:
    """How many copies of `size` are queued together, so that what starts them is not what is measured."""
    return max(min(_QUEUED // size, _MOST_COPIES), 1)


def window(size: int) -> int:
    """Bytes of all copies that are queued together; none of them touches the memory of another."""
    return size * copies(size)


def measure(
    paths: Sequence[ProbePath],
    effort_for: Callable[[ProbePath], Effort],
    seconds: float,
    on_path: Callable[[str], None] = lambda label: None,
) -> list[PathResult]:
    """Measure every path that can run, one after the other; time that one leaves over goes to the rest.

    Parameters
    ----------
    effort_for
        How much to measure of a path; its share of the time is given here.
    seconds
        For all of them together, about: it bounds the sizes and the runs, not the single run.
    on_path
        Told the label of every path before it is looked at.
    """
    refusals = [probe.why_not() for probe in paths]
    left = refusals.count(None)
    deadline = time.perf_counter() + seconds
    results = []
    for probe, refusal in zip(paths, refusals, strict=True):
        on_path(probe.path.label)
        if refusal is not None:
            results.append(PathResult(probe.path, "waived", refusal))
            continue
        share = (deadline - time.perf_counter()) / left
        left -= 1
        results.append(measure_path(probe, effort_for(probe), share))
        log.debug("probed %s within %.1f s", probe.path.label, share)
    return results


def measure_path(probe: ProbePath, effort: Effort, seconds: float) -> PathResult:
    """Measure one path in about `seconds`: the smallest size in any case, larger ones while time is left."""
    end = time.perf_counter() + seconds
    samples: list[Sample] = []
    try:
        with on_cores(probe.cores):
            for index, size in enumerate(effort.sizes):
                left = end - time.perf_counter()
                if samples and _expected(samples[-1], size) > left:
                    return _ended(probe, samples, size, "it would take longer than its share of --seconds")
                samples.append(_sample(probe, size, effort, left / (len(effort.sizes) - index)))
    except (Waived, TierFull, torch.OutOfMemoryError) as refusal:
        return _ended(probe, samples, effort.sizes[len(samples)], _first_line(refusal))
    except (TiersError, RuntimeError) as error:  # RuntimeError: what torch raises for CUDA
        return PathResult(probe.path, "failed", _first_line(error), tuple(samples))
    return PathResult(probe.path, "measured", samples=tuple(samples))


@contextmanager
def prepared(probe: ProbePath, size: int, *, verify: bool) -> Iterator[None]:
    """Inside, the path is warm and its data has been checked; what it holds is given back after."""
    try:
        probe.prepare(size)
        probe.run(size)
        if verify and not probe.intact():
            raise TiersError(f"a copy of {format_size(size)} did not arrive as it was sent")
        yield
    finally:
        probe.release()


def repeat(probe: ProbePath, size: int, runs: int | None, seconds: float) -> Sample:
    """Run at least once, then up to `runs` times (None: any number) while `seconds` last."""
    end = time.perf_counter() + seconds
    done: list[Run] = []
    while not done or (time.perf_counter() < end and (runs is None or len(done) < runs)):
        done.append(probe.run(size))
    kept = done[len(done) // 2 :] if runs is None else done
    return Sample(size, done[0].nbytes, tuple(run.seconds for run in kept))


def _sample(probe: ProbePath, size: int, effort: Effort, seconds: float) -> Sample:
    start = time.perf_counter()
    with prepared(probe, size, verify=effort.verify):
        return repeat(probe, size, effort.samples, seconds - (time.perf_counter() - start))


def _expected(last: Sample, size: int) -> float:
    """Seconds that `size` takes at the least, if it is as fast as the last one was."""
    return _RUNS_PER_SIZE * last.median * window(size) / window(last.size)


def _ended(probe: ProbePath, samples: list[Sample], size: int, reason: str) -> PathResult:
    if not samples:
        return PathResult(probe.path, "waived", reason)
    return PathResult(probe.path, "measured", f"stopped before {format_size(size)}: {reason}", tuple(samples))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
