"""The core under AddressSanitizer and ThreadSanitizer, with eight threads at once."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
CORE = [
    ROOT / "allocator" / "native" / f"{name}.cpp"
    for name in ("core", "cuda", "heap", "heap_pages", "interface", "layout", "memfd", "packing", "pages")
]
COMPILER = shutil.which("g++") or shutil.which("clang++")


def test_every_call_of_the_core_is_made_under_the_sanitisers() -> None:
    calls = set(re.findall(r"\b(tn_\w+)\(", (ROOT / "allocator" / "native" / "core.h").read_text()))
    made = set(re.findall(r"\btn_\w+", (ROOT / "tests" / "native" / "stress.cpp").read_text()))
    assert "tn_allocate" in calls
    assert not calls - made


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
@pytest.mark.parametrize("seconds", [2, pytest.param(60, marks=pytest.mark.stress)])
@pytest.mark.timeout(300)
def test_eight_threads_neither_race_nor_lose_a_byte(sanitizer: str, seconds: int, tmp_path: Path) -> None:
    program = tmp_path / "stress"
    flags = ["-std=c++17", "-O1", "-g", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    sources = [str(path) for path in (ROOT / "tests" / "native" / "stress.cpp", *CORE)]
    include = f"-I{ROOT / 'allocator' / 'native'}"
    assert COMPILER is not None
    built = subprocess.run(
        [COMPILER, *flags, include, *sources, "-o", str(program), "-ldl", "-pthread"], capture_output=True, text=True
    )
    if "cannot find" in built.stderr:
        pytest.skip("the compiler comes without this sanitizer")
    assert built.returncode == 0, built.stderr
    # Addresses of the sanitisers' own lie where randomisation may put ours: off, where the tool is.
    fixed = ["setarch", "-R"] if shutil.which("setarch") else []
    done = subprocess.run(
        [*fixed, str(program), str(seconds), str(random.randrange(1 << 16))],
        capture_output=True,
        text=True,
        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"},
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
