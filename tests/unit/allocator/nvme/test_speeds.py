"""The measurement of a way: by a child that may hang or die, kept in a file that may be bad."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.unit.ways_fakes import EVEN, FAST, MACHINE, PLACE, UUID
from torch_tiers.allocator.nvme import time_way
from torch_tiers.allocator.nvme.speeds import (
    cached,
    environment,
    file_of,
    keep,
    key_of,
    run_child,
    speeds,
)
from torch_tiers.allocator.nvme.ways import Measured, Speeds, Way

KEY = key_of(MACHINE, PLACE)
TOLD = '{"write": 1e9, "read": 2e9, "both": 3e9}'


def child(program: str, directory: Path, timeout: float = 30) -> Measured:
    return run_child("gds", directory, "", command=(sys.executable, "-c", program), timeout=timeout)


# -------------------------------------------------------------------------------------------- the child


def test_the_last_line_of_a_child_tells_the_speeds(tmp_path: Path) -> None:
    assert child(f"print('cuFile says hello'); print('{TOLD}')", tmp_path) == Speeds(1e9, 2e9, 3e9)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import os; os.kill(os.getpid(), 11)", "gds ended with signal 11 and without a result"),
        ("raise SystemExit(3)", "gds ended with code 3 and without a result"),
        ("print('nonsense')", "gds ended with code 0 and without a result"),
        ("print('[' * 100000)", "without a result"),
        ("print('{\"write\": 1e9}')", "without a result"),
        ('print(\'{"write": NaN, "read": 1, "both": 1}\')', "without a result"),
        ('print(\'{"error": "no room\\\\n at all"}\'); raise SystemExit(1)', "gds failed: no room at all"),
        (f"print('{TOLD}'); raise SystemExit(1)", "code 1"),
    ],
)
def test_a_child_that_dies_or_talks_nonsense_is_a_reason(tmp_path: Path, program: str, reason: str) -> None:
    found = child(program, tmp_path)
    assert isinstance(found, str) and reason in found and "\n" not in found


def test_a_child_that_hangs_is_ended(tmp_path: Path) -> None:
    start = time.perf_counter()
    assert child("import time; time.sleep(60)", tmp_path, timeout=0.5) == "the measurement of gds did not end in 0 s"
    assert time.perf_counter() - start < 20


def test_a_child_that_cannot_be_started_is_a_reason(tmp_path: Path) -> None:
    found = run_child("gds", tmp_path, "", command=("/nowhere/python",))
    assert isinstance(found, str) and "cannot be started: No such file" in found


def test_cufile_must_not_fall_back_in_a_child_nor_tiers_start() -> None:
    parent = {"TIERS_ALLOCATOR": "pages", "PYTORCH_ALLOC_CONF": "expandable_segments:True", "HOME": "/there"}
    direct = environment("p2pdma", UUID, parent)
    assert direct == {
        "HOME": "/there",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "CUDA_VISIBLE_DEVICES": f"GPU-{UUID}",
        "CUFILE_USE_PCIP2PDMA": "true",
        "CUFILE_ALLOW_COMPAT_MODE": "false",
    }
    assert environment("gds", UUID, parent)["CUFILE_USE_PCIP2PDMA"] == "false"
    assert "CUFILE_ALLOW_COMPAT_MODE" not in environment("host", UUID, parent)


def test_the_real_child_says_why_it_cannot(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("here it can")
    found = run_child("host", tmp_path, "")
    assert isinstance(found, str) and "the measurement of host failed: " in found
    assert list(tmp_path.iterdir()) == []


class OnTheHost:
    """Moves between a ring and a file, which both lie in host memory."""

    def __init__(self) -> None:
        self.ring = torch.empty(time_way.RING, dtype=torch.uint8)
        self.file = torch.empty(2 * time_way.RING, dtype=torch.uint8)
        self.loses = False

    def write(self, slot: int, offset: int) -> None:
        if not self.loses:
            self.file[offset : offset + time_way.CHUNK] = self.ring[time_way._of(slot)]

    def read(self, slot: int, offset: int) -> None:
        self.ring[time_way._of(slot)] = self.file[offset : offset + time_way.CHUNK]

    def close(self) -> None:
        pass


def test_each_direction_and_both_are_timed_and_the_data_checked() -> None:
    told = time_way.time_moves(OnTheHost(), lambda: None)
    assert set(told) == {"write", "read", "both"} and min(told.values()) > 0
    lossy = OnTheHost()
    lossy.loses = True
    with pytest.raises(OSError, match="not what was written"):
        time_way.time_moves(lossy, lambda: None)


# -------------------------------------------------------------------------------------------- the cache


def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    kept: dict[Way, Measured] = {"host": EVEN, "gds": FAST, "p2pdma": "it hung"}
    keep(tmp_path / "new", KEY, kept)
    assert cached(tmp_path / "new", KEY) == kept
    assert [file.name for file in (tmp_path / "new").iterdir()] == [file_of(tmp_path, KEY).name]


@pytest.mark.parametrize("changed", ["kernel", "driver", "kvikio"])
def test_another_machine_is_measured_anew(tmp_path: Path, changed: str) -> None:
    keep(tmp_path, KEY, {"host": EVEN})
    assert cached(tmp_path, key_of(replace(MACHINE, **{changed: "other"}), PLACE)) == {}


@pytest.mark.parametrize("changed", [{"device": "8:1"}, {"kind": "xfs"}, {"options": ("ro",)}])
def test_another_file_system_is_measured_anew(tmp_path: Path, changed: dict) -> None:
    keep(tmp_path, KEY, {"host": EVEN})
    assert cached(tmp_path, key_of(MACHINE, replace(PLACE, **changed))) == {}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda kept: "",
        lambda kept: "{",
        lambda kept: "[]",
        lambda kept: "[" * 100_000,
        lambda kept: " " * 100_000 + json.dumps(kept),
        lambda kept: json.dumps({**kept, "format": 2}),
        lambda kept: json.dumps({**kept, "key": {}}),
        lambda kept: json.dumps({**kept, "at": "now"}),
        lambda kept: json.dumps({**kept, "ways": []}),
        lambda kept: json.dumps({**kept, "ways": {"teleport": "x"}}),
        lambda kept: json.dumps({**kept, "ways": {"host": {"write": 1, "read": 1}}}),
        lambda kept: json.dumps({**kept, "ways": {"host": {"write": -1, "read": 1, "both": 1}}}),
        lambda kept: json.dumps({**kept, "ways": {"host": {"write": True, "read": 1, "both": 1}}}),
        lambda kept: json.dumps({**kept, "ways": {"host": {"write": float("inf"), "read": 1, "both": 1}}}),
        lambda kept: json.dumps({**kept, "ways": {"host": {"write": 1e15, "read": 1, "both": 1}}}),
        lambda kept: json.dumps({**kept, "ways": {"host": 3}}),
    ],
)
def test_a_bad_file_counts_as_none(tmp_path: Path, spoil) -> None:
    keep(tmp_path, KEY, {"host": EVEN})
    file = file_of(tmp_path, KEY)
    file.write_text(spoil(json.loads(file.read_text())))
    assert cached(tmp_path, KEY) == {}
    file.unlink()
    file.mkdir()
    assert cached(tmp_path, KEY) == {}


def test_what_failed_is_tried_again_after_a_day(tmp_path: Path) -> None:
    keep(tmp_path, KEY, {"host": EVEN, "gds": "it hung"})
    assert cached(tmp_path, KEY, time.time() + 3600) == {"host": EVEN, "gds": "it hung"}
    assert cached(tmp_path, KEY, time.time() + 25 * 3600) == {"host": EVEN}
    assert cached(tmp_path, KEY, time.time() - 3600) == {"host": EVEN}  # the clock was set back


def test_only_what_is_not_kept_is_measured(tmp_path: Path) -> None:
    asked: list[Way] = []

    def measure(way: Way, directory: Path, gpu: str) -> Measured:
        assert (directory, gpu) == (PLACE.path, UUID)
        asked.append(way)
        return FAST

    for _ in range(2):
        assert speeds(["host", "gds"], MACHINE, PLACE, tmp_path, measure) == {"host": FAST, "gds": FAST}
    assert asked == ["host", "gds"]
    assert speeds(["host", "p2pdma"], MACHINE, PLACE, tmp_path, measure) == {"host": FAST, "p2pdma": FAST}
    assert asked == ["host", "gds", "p2pdma"]
    assert set(cached(tmp_path, KEY)) == {"host", "gds", "p2pdma"}


def test_a_cache_that_cannot_be_written_costs_a_measurement_each_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for cache in (tmp_path / "file/below", None):
        assert speeds(["host"], MACHINE, PLACE, cache, lambda way, directory, gpu: EVEN) == {"host": EVEN}
