"""One thread of OpenMP's for all that these tests start, and one cache for what Inductor compiles."""

from __future__ import annotations

import os
import sys
from importlib import import_module

import pytest

from torch_tiers.places import cache_directory

# Beside what is built for this user, so that whoever keeps that from run to run keeps this: half a minute of compiling.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_directory() / "inductor"))

# Before torch is imported, and for programs that tests start. Tests run a process per core, and the runtime has threads
# of its own: OpenMP's would spin on the cores that these wait for, and tests take several times their time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # for the few tests with several
if "OMP_NUM_THREADS" not in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
    if "torch" in sys.modules:  # tests of other folders are collected, too
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True)
def plans_come_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans come after one iteration that is recorded: most programs here train for four steps.

    More of them make times truer, which these tests do not ask about. Programs in processes of their own record as
    many as users' do.
    """
    if "torch" in sys.modules:  # which tests without it must not import
        monkeypatch.setattr(import_module("torch_tiers.migrator.runtime.devices"), "RECORDINGS", 1)
