"""Peaks of iterations and of their parts, out of the core."""

from __future__ import annotations

from torch_tiers.allocator.native import Core
from torch_tiers.allocator.native.peaks import PeaksOfCore
from torch_tiers.allocator.sizes import MiB


def test_parts_tell_peaks_of_their_own_and_the_period_its_highest(core: Core) -> None:
    peaks = PeaksOfCore(lambda: core)
    kept = core.allocate(2 * MiB)
    taken = []
    for size in (6, 8, 1):
        core.free(core.allocate(size * MiB))
        taken.append(peaks.take_peak())
    assert taken == [8 * MiB, 10 * MiB, 3 * MiB]
    assert peaks.restart()[0] == 10 * MiB
    core.free(kept)
    assert [peaks.restart()[0], peaks.restart()[0]] == [2 * MiB, 0]


def test_a_period_that_ends_takes_nothing_from_what_another_thread_measures(core: Core) -> None:
    peaks = PeaksOfCore(lambda: core)
    core.free(core.allocate(20 * MiB))
    peaks.restart()
    assert peaks.take_peak() == 20 * MiB


def test_what_the_program_sees_is_as_if_nobody_had_asked(core: Core) -> None:
    peaks = PeaksOfCore(lambda: core)
    core.free(core.allocate(6 * MiB))
    peaks.restart()
    peaks.take_peak()
    assert core.counts().allocated_peak == 6 * MiB


def test_before_the_first_request_nothing_is_in_use() -> None:
    peaks = PeaksOfCore(lambda: None)
    assert (peaks.take_peak(), peaks.restart(), peaks.retries()) == (0, (0, 0), 0)


def test_requests_for_which_idle_pages_went_back_are_retries(core: Core) -> None:
    """Here pages that lie idle for one stream each, and another stream asks for all there are."""
    peaks = PeaksOfCore(lambda: core)
    assert peaks.retries() == core.counts().retries == 0
    for block in [core.allocate(32 * MiB, stream=stream) for stream in (1, 2)]:
        core.free(block)
    core.free(core.allocate(64 * MiB, stream=3))
    assert peaks.retries() == core.counts().retries == 1
    assert peaks.restart() == (64 * MiB, 1)


def test_requests_are_delayed_by_pages_that_are_mapped_for_them_alone(core: Core) -> None:
    peaks = PeaksOfCore(lambda: core)
    core.free(core.allocate(64 * MiB))
    delayed = peaks.delayed()
    core.free(core.allocate(64 * MiB))
    assert peaks.delayed() == delayed > 0
