"""Peaks of periods and of laps, out of the core."""

from __future__ import annotations

import sys
import threading

from allocator.native import Core
from allocator.peaks import Peaks
from allocator.sizes import MiB


def test_laps_tell_peaks_of_their_own_and_the_period_its_highest(core: Core) -> None:
    peaks = Peaks(lambda: core)
    kept = core.allocate(2 * MiB)
    laps = []
    for size in (6, 8, 1):
        core.free(core.allocate(size * MiB))
        laps.append(peaks.lap())
    assert laps == [8 * MiB, 10 * MiB, 3 * MiB]
    assert peaks.restart()[0] == 10 * MiB
    core.free(kept)
    assert [peaks.restart()[0], peaks.restart()[0]] == [2 * MiB, 0]


def test_what_the_program_sees_is_as_if_nobody_had_asked(core: Core) -> None:
    peaks = Peaks(lambda: core)
    core.free(core.allocate(6 * MiB))
    peaks.restart()
    peaks.lap()
    assert core.counts().allocated_peak == 6 * MiB


def test_before_the_first_request_nothing_is_in_use() -> None:
    peaks = Peaks(lambda: None)
    assert (peaks.lap(), peaks.restart(), peaks.retries()) == (0, (0, 0), 0)


def test_requests_for_which_idle_pages_went_back_are_retries(core: Core) -> None:
    """One of the budget's size, where others lie idle in a part of it that cannot be joined to the rest."""
    peaks = Peaks(lambda: core)
    assert peaks.retries() == core.counts().retries == 0
    low, high = core.allocate(32 * MiB, stream=1), core.allocate(32 * MiB, stream=2)
    core.free(low)
    core.free(high)
    core.free(core.allocate(64 * MiB, stream=3))
    assert peaks.retries() == core.counts().retries == 1
    assert peaks.restart() == (64 * MiB, 1)


def test_no_peak_is_lost_between_threads(core: Core) -> None:
    """One that restarts while another is at a lap: each peak is told by the one or the other."""
    peaks, told = Peaks(lambda: core), []
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        done = threading.Event()

        def laps() -> None:
            while not done.is_set():
                peaks.lap()

        thread = threading.Thread(target=laps)
        thread.start()
        for _ in range(500):
            core.free(core.allocate(6 * MiB))
            told.append(peaks.restart()[0])
        done.set()
        thread.join()
    finally:
        sys.setswitchinterval(before)
    assert told == [6 * MiB] * 500
