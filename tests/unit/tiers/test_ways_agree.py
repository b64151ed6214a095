"""`tiers doctor`, `tiers probe` and a run tell the same of how GPU memory goes to a directory."""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.ways_fakes import EVEN, FAST, MACHINE, PLACE, SLOW, UUID
from torch_tiers import drives, spoken
from torch_tiers.allocator.errors import StoreError, TiersError
from torch_tiers.allocator.nvme import choose, decide, speeds
from torch_tiers.allocator.nvme.decide import Decision
from torch_tiers.allocator.nvme.facts import Machine, Place
from torch_tiers.allocator.nvme.posix import PosixFile
from torch_tiers.allocator.nvme.ways import NAMES, Gds, Measured, Way
from torch_tiers.allocator.sizes import MiB
from torch_tiers.cli import doctor as doctor_verb
from torch_tiers.cli.main import main
from torch_tiers.config import NvmeConfig
from torch_tiers.drives import Drives
from torch_tiers.places import cache_directory
from torch_tiers.probe import gds as probe_gds
from torch_tiers.topology import Gpu, discover

NO_MODULE = replace(MACHINE, nvidia_fs=False)
OTHER = replace(PLACE, device="259:2", drive="nvme1n1")
HUNG = "the measurement of p2pdma did not end in 60 s"


class Straight(PosixFile):
    device_memory = True

    def __init__(self, directory: Path, *, mode: str) -> None:
        super().__init__(directory)


@dataclass
class Bench:
    """A machine, what each directory lies on, and what a measurement of each way gives."""

    machine: Machine = MACHINE
    places: dict[Path, Place] = field(default_factory=dict)
    told: dict[Way, Measured] = field(default_factory=lambda: {"host": EVEN, "gds": FAST, "p2pdma": FAST})
    asked: list[tuple[Way, Path]] = field(default_factory=list)

    def measure(self, way: Way, directory: Path, gpu: str) -> Measured:
        self.asked.append((way, directory))
        return self.told[way]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench(places={tmp_path: PLACE})
    gpus = (Gpu(0, "H100", 80 << 30, "0:0", "580"),)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(
        decide, "read_machine", lambda gpu: made.machine if gpu == UUID else replace(made.machine, gpu=None)
    )
    monkeypatch.setattr(decide, "read_place", lambda path: replace(made.places[path], path=path))
    monkeypatch.setattr(speeds, "run_child", made.measure)
    monkeypatch.setattr(doctor_verb, "discover", lambda: replace(discover(), gpus=gpus))
    monkeypatch.setattr(choose, "_said", set())
    for module in (choose, drives):
        monkeypatch.setattr(module, "gpu_in_use", lambda: UUID)
    monkeypatch.setattr(choose, "KvikioFile", Straight)
    return made


@pytest.fixture
def doctor(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[Gds], dict[str, dict[str, str]]]:
    """The findings of `tiers doctor`, by their subjects."""

    def ask(gds: Gds) -> dict[str, dict[str, str]]:
        file = tmp_path / "tiers.toml"
        paths = json.dumps([str(path) for path in bench.places])
        file.write_text(f'nvme.capacity = "1MiB"\nnvme.gds = "{gds}"\nnvme.paths = {paths}\n')
        monkeypatch.setenv("TIERS_CONFIG", str(file))
        main(["doctor", "--json"])
        return {finding["subject"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}

    return ask


def drives_of(bench: Bench, gds: Gds) -> Drives:
    config = NvmeConfig(paths=tuple(bench.places), gds=gds)
    return Drives(config, 4 * MiB, step=MiB, account=None, rooms={}, cache=cache_directory(), on_gpu=True)


def run(bench: Bench, gds: Gds) -> tuple[Decision, bool]:
    """What a run decides, and whether the files that it opens take GPU memory."""
    made = drives_of(bench, gds)
    made.store.close()
    assert made._decision is not None
    return made._decision, made.store.takes_device_memory


def assert_agreed(bench: Bench, doctor: Callable[[Gds], dict[str, dict[str, str]]], gds: Gds) -> str | None:
    """All three tell the same way and the same reason, which is returned."""
    findings = doctor(gds)
    probed = probe_gds.gds_obstacle(tuple(bench.places), gds)
    decision, direct = run(bench, gds)
    for path, decided in decision.directories.items():
        finding = findings[f"nvme {path}"]
        assert f"GPU memory goes {NAMES[decided.choice.way]}" in finding["found"]
        assert finding["found"].partition("; not direct: ")[2] == (decided.choice.why_not or "")
        assert finding["advice"] == decided.choice.change
    assert (decision.obstacle is None) == direct == decision.direct
    assert probed == (None if direct else str(decision.obstacle))
    assert ("not in use" in findings["GDS"]["found"]) == (not direct)
    if decision.obstacle is not None:
        assert decision.obstacle.reason in findings["GDS"]["found"]
    return probed


@pytest.mark.parametrize(
    ("machine", "place", "reason"),
    [
        (MACHINE, PLACE, None),
        (NO_MODULE, PLACE, None),
        (replace(NO_MODULE, p2pdma=False), PLACE, "nvidia-fs is not loaded, and without it the kernel"),
        (replace(MACHINE, udev=False), PLACE, "/run/udev cannot be read"),
        (replace(MACHINE, gpu=None), PLACE, "no CUDA device"),
        (replace(MACHINE, kvikio=None), PLACE, "kvikio is not installed"),
        (MACHINE, replace(PLACE, kind="overlay"), "no direct way to overlay"),
        (MACHINE, replace(PLACE, drive="md0", raid="raid5"), "md raid5"),
    ],
)
def test_they_agree_on_what_the_facts_close(bench: Bench, doctor, machine, place, reason, tmp_path: Path) -> None:
    bench.machine, bench.places = machine, {tmp_path: place}
    told = assert_agreed(bench, doctor, "prefer")
    assert told is None if reason is None else reason in (told or "")


@pytest.mark.parametrize(
    ("found", "reason"),
    [(SLOW, "p2pdma moves 9.4 GB/s both ways at once, host memory 10.0 GB/s; nvme.gds = "), (HUNG, HUNG)],
)
def test_they_agree_on_a_direct_way_that_is_slow_or_hangs(bench: Bench, doctor, found: Measured, reason: str) -> None:
    bench.machine, bench.told["p2pdma"] = NO_MODULE, found
    assert reason in (assert_agreed(bench, doctor, "prefer") or "")


def test_a_slow_direct_way_that_is_required_is_in_use_for_all(bench: Bench, doctor) -> None:
    bench.machine, bench.told["p2pdma"] = NO_MODULE, SLOW
    assert assert_agreed(bench, doctor, "require") is None


def test_where_one_of_two_directories_is_direct_they_agree_that_none_goes_directly(
    bench: Bench, doctor, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    bench.places = {tmp_path / "a": PLACE, tmp_path / "b": replace(OTHER, kind="overlay")}
    why = f"all directories must, and {tmp_path / 'b'} does not: cuFile has no direct way to overlay"
    assert why in (assert_agreed(bench, doctor, "prefer") or "")


def test_what_one_of_them_measured_the_others_go_by(bench: Bench, doctor, tmp_path: Path) -> None:
    assert_agreed(bench, doctor, "prefer")
    assert bench.asked == [("host", tmp_path), ("gds", tmp_path), ("p2pdma", tmp_path)]


def test_what_a_run_refuses_doctor_and_probe_give_the_reason_for(bench: Bench, doctor) -> None:
    bench.machine, bench.told["p2pdma"] = NO_MODULE, HUNG
    with pytest.raises(TiersError, match=HUNG):
        run(bench, "require")
    assert HUNG in doctor("require")["GDS"]["found"] and doctor("require")["GDS"]["status"] == "missing"
    assert probe_gds.gds_obstacle(tuple(bench.places), "require") == HUNG


def test_doctor_measures_the_host_s_way_where_no_other_is_open_and_a_run_does_not(
    bench: Bench, doctor, tmp_path: Path
) -> None:
    bench.machine = replace(NO_MODULE, p2pdma=False)
    run(bench, "prefer")
    assert bench.asked == []
    for gds in ("prefer", "require", "off"):
        finding = doctor(gds)[f"nvme {tmp_path}"]
        assert "through host memory, host 10.0/10.0/10.0 GB/s write/read/both; not direct: " in finding["found"]
        assert finding["advice"] == ('set nvme.gds to "prefer"' if gds == "off" else "load it: modprobe nvidia-fs")
    assert bench.asked == [("host", tmp_path)]


def test_doctor_says_why_the_host_s_way_has_no_speed(bench: Bench, doctor, tmp_path: Path) -> None:
    bench.machine, bench.told["host"] = replace(NO_MODULE, p2pdma=False), "the measurement of host failed: no room"
    assert (
        "through host memory, the measurement of host failed: no room; not"
        in doctor("prefer")[f"nvme {tmp_path}"]["found"]
    )


def test_where_cuda_does_not_start_doctor_tells_all_the_rest(
    bench: Bench, doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that is full, or another process's alone: that is when one asks."""

    def refuse() -> str:
        raise RuntimeError("CUDA error: all devices are busy")

    monkeypatch.setattr(choose, "gpu_in_use", refuse)
    assert "memory" in doctor("prefer")
    assert bench.asked == []


def test_what_is_decided_twice_is_measured_once_where_no_cache_can_be_written(
    bench: Bench, doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.told |= {"gds": "it hangs", "p2pdma": HUNG}

    def refuse(*_: object) -> None:
        raise OSError("read-only file system")

    monkeypatch.setattr(speeds, "keep", refuse)
    doctor("require")
    assert len(bench.asked) == len(set(bench.asked)) == 3


def test_without_a_gpu_doctor_measures_nothing(bench: Bench, doctor) -> None:
    bench.machine = replace(MACHINE, gpu=None)
    doctor("prefer")
    assert bench.asked == []


# ------------------------------------------------------------------------- what a run says on a terminal


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if "through host memory" in message]


def at_the_default_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "tiers")
    caplog.handler.setLevel(logging.NOTSET)  # as the handler of ours, which gets what is said past the logger's level


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Somebody looks on, who has not asked for anything to be said."""
    monkeypatch.setattr(spoken, "sys", SimpleNamespace(stderr=Terminal()))  # pytest sets its own before the test
    at_the_default_level(caplog)


@pytest.mark.parametrize("found", [SLOW, HUNG])
def test_a_run_says_in_one_line_on_a_terminal_why_it_goes_through_host_memory(
    bench: Bench, terminal: None, caplog: pytest.LogCaptureFixture, found: Measured
) -> None:
    bench.machine, bench.told["p2pdma"] = NO_MODULE, found
    decision, _ = run(bench, "prefer")
    assert lines(caplog) == [f"nvme goes through host memory: {decision.obstacle}"]


def test_a_file_that_cufile_refuses_after_all_is_told_on_a_terminal(
    bench: Bench, terminal: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(directory: Path, *, mode: str) -> PosixFile:
        raise StoreError(str(directory), 0, 0, "open a file for cuFile in", "error 5008")

    monkeypatch.setattr(choose, "KvikioFile", refuse)
    assert not run(bench, "prefer")[1]
    (line,) = lines(caplog)
    assert line.startswith("nvme goes through host memory: ") and "error 5008" in line


def test_doctor_and_probe_tell_of_a_file_that_cufile_refuses_as_a_run_does(
    bench: Bench, doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(directory: Path, *, mode: str) -> PosixFile:
        raise StoreError(str(directory), 0, 0, "open a file for cuFile in", "error 5008")

    monkeypatch.setattr(choose, "KvikioFile", refuse)
    assert "error 5008" in (assert_agreed(bench, doctor, "prefer") or "")


def test_a_run_that_goes_directly_or_wants_no_direct_way_says_nothing(
    bench: Bench, terminal: None, caplog: pytest.LogCaptureFixture
) -> None:
    run(bench, "prefer")
    bench.machine = replace(NO_MODULE, p2pdma=False)
    drives_of(bench, "off").store.close()
    assert lines(caplog) == []


def test_where_nobody_looks_on_nothing_is_said(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    at_the_default_level(caplog)
    bench.machine = replace(NO_MODULE, p2pdma=False)
    run(bench, "prefer")
    assert lines(caplog) == []


def test_who_asked_for_more_is_told_the_way_of_each_directory_alone(
    bench: Bench, terminal: None, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO, "tiers")
    bench.machine = replace(NO_MODULE, p2pdma=False)
    decision, _ = run(bench, "prefer")
    assert lines(caplog) == [f"nvme at {tmp_path} goes {decision.directories[tmp_path].describe()}"]
