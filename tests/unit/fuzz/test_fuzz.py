"""Hostile files and variables end in an error that says so: in no other exception, nor in a wait, nor out of memory.

``--stress`` takes 10,000 inputs of each kind, and FUZZ_INPUTS as many as it says: an hour of the processor takes some
hundred thousand. What was found is repeated with TEST_SEED.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SHARE = 10_000  # inputs that one process takes: what one leaves behind is to be seen, but not to wait for long
COUNTS = {"configs": 2000, "traces": 400, "reports": 500}  # about ten seconds each


@pytest.mark.timeout(0)  # with many inputs; each process of these has a limit of its own
@pytest.mark.parametrize("kind", COUNTS)
def test_hostile_inputs_are_taken_or_refused(kind: str, seed: int, request: pytest.FixtureRequest) -> None:
    usual = 10_000 if request.config.getoption("--stress") else COUNTS[kind]
    count = int(os.environ.get("FUZZ_INPUTS", usual))
    for first in range(0, count, SHARE):
        fuzz(kind, seed, first, min(first + SHARE, count))


def fuzz(kind: str, seed: int, first: int, end: int) -> None:
    command = [sys.executable, "-m", "tests.unit.fuzz.run", kind, *map(str, (seed, first, end))]
    environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # whose threads would take addresses, which are bounded
    patience = 60 + (end - first)  # for what no signal interrupts
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=patience, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
