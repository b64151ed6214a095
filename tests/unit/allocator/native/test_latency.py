"""A request that is served from what is mapped takes a microsecond or so, and so does its free."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.request_latency import COMPILER, build, measure

LIMIT = 2_000  # nanoseconds, at the median, of a machine that does nothing else
LOADED = 5  # times as long on one that does


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("laid_out", [True, False], ids=["laid out", "best fit"])
@pytest.mark.parametrize("sequence", ["gpt-1.3b", "resnet152-b256"])
def test_a_request_from_mapped_memory_is_quick(sequence: str, laid_out: bool, tmp_path: Path) -> None:
    seen = measure(build(tmp_path), sequence, laid_out=laid_out, periods=5)
    print(seen)
    assert seen.maps == 0  # what was timed came from what was mapped
    assert seen.planned == (seen.allocate.calls if laid_out else 0)
    assert seen.allocate.p50 < LOADED * LIMIT
    assert seen.free.p50 < LOADED * LIMIT
