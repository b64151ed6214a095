"""`tiers probe` as users call it."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest

from tests.unit.by_hand import eventually
from torch_tiers.allocator.sizes import KiB, MiB
from torch_tiers.cli.main import main
from torch_tiers.probe import measure


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(measure, "QUICK_SIZES", (64 * KiB, 16 * MiB))
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # the verb sets it; here it is put back
    monkeypatch.chdir(tmp_path)
    log = logging.getLogger("tiers")
    level = log.level
    monkeypatch.setattr(log, "handlers", [])  # the verb adds one that writes to what is stderr only now
    yield
    log.setLevel(level)


def test_json_validates_and_links_reach_the_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    words = ["--quick", "--seconds", "20", "--paths", "disk_*", "--nvme-path", str(disk), "--json", "--write"]
    assert main(["probe", *words]) == 0
    data = json.loads(capsys.readouterr().out)
    jsonschema.validate(data, json.loads(files("torch_tiers.probe").joinpath("schema.json").read_text()))
    assert [found["status"] for found in data["results"]] == ["measured", "measured"]
    assert main(["config", "--json"]) == 0
    keys = json.loads(capsys.readouterr().out)["keys"]
    for found in data["results"]:
        peak = max(sample["bandwidth"] for sample in found["samples"] if sample["size"] >= 16 * MiB)
        assert keys[f"links.{found['path']['lane']}"] == {"value": float(round(peak)), "origin": "./tiers.toml"}
    assert list(disk.iterdir()) == []


def test_a_table_is_printed_without_a_directory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "--quick", "--seconds", "1", "--paths", "memcpy,disk_read"]) == 0
    out = capsys.readouterr().out
    assert "memcpy dram0>dram0" in out
    assert "--nvme-path" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--paths", "d2hh"], "did you mean d2h?"),
        (["--nvme-path", "nowhere"], "nowhere is not a directory"),
        (["--plot", "x.gif"], "x.gif"),
        (["--write"], "--force"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_measured(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("tiers.toml").write_text("[links]\nd2h = 1e9\n")
    assert main(["probe", *words]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_links_that_could_not_be_written_are_a_mistake_before_anything_is_measured(
    force: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may write anywhere, so permissions cannot show it in a container.
    monkeypatch.setattr("os.access", lambda *_: False)
    assert main(["probe", "--write", *force]) == 2
    err = capsys.readouterr().err
    assert "tiers.toml cannot be written: " in err and err.count("\n") == 1


def test_ctrl_c_leaves_no_file(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    words = ["probe", "--quick", "--sustained", "--seconds", "60", "--paths", "disk_write", "--nvme-path", str(disk)]
    probe = subprocess.Popen(
        [sys.executable, "-m", "torch_tiers", *words],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert eventually(lambda: has_file_open(probe.pid, disk))
        time.sleep(0.1)
        probe.send_signal(signal.SIGINT)
        _, err = probe.communicate(timeout=100)  # it waits for what it asked the disk for
    finally:
        probe.kill()
        probe.communicate()
    assert probe.returncode == 130
    assert "Traceback" not in err
    assert list(disk.iterdir()) == []


def has_file_open(pid: int, folder: Path) -> bool:
    try:
        return any(os.readlink(link).startswith(str(folder)) for link in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # a descriptor that was closed meanwhile
        return False
