"""The core and the lanes under sanitizers; on request what is built against PyTorch's headers, too.

The core runs with eight threads at once. The lanes' copies and the extensions are loaded by Python, before which
AddressSanitizer has to be.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.allocator.native.copy.test_lane import STORM
from tests.unit.fake_driver import asked, build

ROOT = Path(__file__).parents[4]
CORE = [
    ROOT / "allocator" / "native" / f"{name}.cpp"
    for name in (
        *(
            "core",
            "counts",
            "driver/cuda",
            "driver/memfd",
            "find",
            "heap",
            "heap_pages",
            "interface",
            "layout",
            "packing",
            "pages",
        ),
    )
]
COMPILER = shutil.which("g++") or shutil.which("clang++")


def test_every_call_of_the_core_is_made_under_the_sanitisers() -> None:
    calls = set(re.findall(r"\b(tn_\w+)\(", (ROOT / "allocator" / "native" / "core.h").read_text()))
    made = set(re.findall(r"\btn_\w+", (ROOT / "tests" / "native" / "stress.cpp").read_text()))
    assert "tn_allocate" in calls
    assert not calls - made


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
@pytest.mark.parametrize("seconds", [1, pytest.param(60, marks=pytest.mark.stress)])
@pytest.mark.timeout(300)
def test_eight_threads_neither_race_nor_lose_a_byte(sanitizer: str, seconds: int, tmp_path: Path, seed: int) -> None:
    program = tmp_path / "stress"
    flags = ["-std=c++17", "-Og", "-g1", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
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
        [*fixed, str(program), str(seconds), str(seed % (1 << 16))],
        capture_output=True,
        text=True,
        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"},
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0


CHECKED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g")


def loaded_first() -> dict[str, str]:
    """The environment in which Python loads what was built with `CHECKED`."""
    names = ("libasan.so", "libubsan.so")
    assert COMPILER is not None
    found = [subprocess.check_output([COMPILER, f"-print-file-name={name}"], text=True).strip() for name in names]
    if not all(Path(path).is_absolute() for path in found):
        pytest.skip("the compiler comes without this sanitizer")
    # What Python itself holds at its end is no leak of ours.
    return {"LD_PRELOAD": " ".join(found), "ASAN_OPTIONS": "detect_leaks=0"}


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_copies_of_a_lane_touch_no_memory_but_their_own(tmp_path: Path) -> None:
    checked = loaded_first()
    asked(build(tmp_path, *CHECKED), STORM + "for seed in range(30): storm(seed)\n", **checked)


@pytest.mark.stress
@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "tests", ["saved/test_tensors.py", "saved/test_shortcut.py", "saved/test_shortcut_to_dropped.py"]
)
def test_what_is_built_against_torch_touches_no_memory_but_its_own(tests: str, tmp_path: Path) -> None:
    environ = {
        **os.environ,
        **loaded_first(),
        "CXX": f"{COMPILER} {' '.join(CHECKED)}",
        "XDG_CACHE_HOME": str(tmp_path),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, "--timeout", "1500", f"tests/unit/migrator/{tests}"],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
