"""A process in which the native lane or core meets a driver that is none: `fake_cuda.cpp` and `fake_pages.cpp`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def build(directory: Path, *more: str) -> Path:
    """Build the lane and its driver there, with `more` flags."""
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", *more]
    for sources, target, visibility in (
        ((ROOT / "allocator" / "native" / "copy").glob("*.cpp"), "liblane.so", "hidden"),  # as CMake builds it
        ((ROOT / "tests" / "unit").glob("fake_*.cpp"), "libcuda.so.1", "default"),
    ):
        out = ["-o", str(directory / target), "-ldl"]
        subprocess.run(["g++", *flags, f"-fvisibility={visibility}", *map(str, sources), *out], check=True)
    return directory


START = """
import ctypes, sys
from array import array
from pathlib import Path
from torch_tiers.allocator.native.copy import lane
library = lane.load(Path(sys.argv[1]) / "liblane.so")
fake = ctypes.CDLL("libcuda.so.1")
def flush(): ctypes.CDLL(None).fflush(None)
"""


def asked(built: Path, program: str, *arguments: str, **environ: str) -> list[str]:
    """What the driver was asked for, and what the program printed, in order."""
    done = subprocess.run(
        [sys.executable, "-u", "-c", START + program + "\nflush()", str(built), *arguments],
        env={**os.environ, "LD_LIBRARY_PATH": str(built), "PYTHONPATH": str(ROOT), **environ},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
