"""How worn a drive is."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from torch_tiers.topology.wear import Wear, wear, wear_of

TOLD = {
    "smartctl": {"exit_status": 0},
    "nvme_smart_health_information_log": {"percentage_used": 34, "data_units_written": 410_156_250},
}


def smartctl(directory: Path, monkeypatch: pytest.MonkeyPatch, prints: str, code: int = 0) -> None:
    """Put a command of that name on the path."""
    (directory / "told").write_text(prints)
    command = directory / "smartctl"
    command.write_text(f'#!/bin/sh\n[ "$3" = /dev/nvme0n1 ] && cat {directory / "told"}\nexit {code}\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory), prepend=":")


@pytest.mark.parametrize("code", [0, 8])
def test_a_drive_tells_how_much_of_its_writes_are_used_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Also one that is about to fail, of which smartctl exits with another code."""
    smartctl(tmp_path, monkeypatch, json.dumps(TOLD), code)
    assert str(wear("nvme0n1")) == "34% of its rated write endurance is used; 191.0 TiB were written so far"


@pytest.mark.parametrize(
    "prints",
    [
        "",
        "[]",
        '{"smartctl": {"exit_status": 2, "messages": [{"string": "Permission denied"}]}}',
        '{"nvme_smart_health_information_log": {"percentage_used": null, "data_units_written": 1}}',
        '{"ata_smart_attributes": {}}',
        '{"nvme_smart_health_information_log": {"percentage_used": Infinity, "data_units_written": 1}}',
        '{"nvme_smart_health_information_log": {"percentage_used": -1, "data_units_written": 1}}',
        '{"nvme_smart_health_information_log": {"percentage_used": 1, "data_units_written": 18446744073709551615}}',
    ],
)
def test_nothing_is_told_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prints: str) -> None:
    smartctl(tmp_path, monkeypatch, prints, 2)
    assert wear("nvme0n1") is None


def test_nothing_is_told_without_smartctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert wear("nvme0n1") is None


def test_what_is_left_is_by_the_drive_s_own_rating() -> None:
    assert [Wear(percent, 3400).left for percent in (34, 100, 120, 0)] == [6600, 0, 0, None]


def test_a_drive_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "smartctl"
    command.write_text("#!/bin/sh\nexec sleep 60\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("torch_tiers.topology.wear.TIMEOUT", 0.5)
    began = time.monotonic()
    assert wear_of([f"nvme{number}n1" for number in range(4)]) == {}
    assert time.monotonic() - began < 10
