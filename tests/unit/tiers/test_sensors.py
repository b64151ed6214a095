from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torch_tiers.migrator.telemetry.transfers import Transfer
from torch_tiers.monitor.build import available_sensors
from torch_tiers.monitor.calibration import Calibration
from torch_tiers.monitor.sensors import Rate, Reading, choose
from torch_tiers.monitor.sensors.copies import Copies, sound
from torch_tiers.monitor.sensors.copy import TimedCopy
from torch_tiers.monitor.sensors.pcie import Pcie
from torch_tiers.monitor.sensors.pressure import Pressure
from torch_tiers.monitor.sensors.resctrl import Resctrl
from torch_tiers.monitor.sensors.uncore import Counter, Uncore, find_counters, parse_config

MiB = 1 << 20


class Ticks:
    """A clock that goes on by a second whenever it is asked."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


class Fake:
    def __init__(self, name: str, reason: str | None = None) -> None:
        self.name = name
        self.reason = reason

    def why_not(self) -> str | None:
        return self.reason

    def read(self) -> Reading | None:
        return None


def values(reading: Reading | None) -> dict[str, float]:
    assert reading is not None
    return dict(reading.values)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# --------------------------------------------------------------------------------------------------- choosing


def test_of_those_that_tell_the_same_the_first_that_works_is_used() -> None:
    choice = choose([[Fake("best", "no permission"), Fake("good"), Fake("poor")], [Fake("other", "not there")]])
    assert [sensor.name for sensor in choice.sensors] == ["good"]
    assert choice.refused == {"best": "no permission", "other": "not there"}


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({"type": "7", "events/cas_count_read": "event=0x04"}, "FileNotFoundError: "),  # of how many bytes?
        ({"type": "7", "cpumask": "", "events/data_read": "event=1", "events/data_read.scale": "1"}, "ValueError: "),
    ],
)
def test_a_sensor_that_finds_what_it_does_not_understand_is_refused_alone(
    tmp_path: Path, found: dict[str, str], reason: str
) -> None:
    for name, text in found.items():
        write(tmp_path / "uncore_imc_0" / name, text)
    choice = choose([[Uncore(tmp_path)], [Fake("other")]])
    assert [sensor.name for sensor in choice.sensors] == ["other"]
    assert choice.refused["uncore"].startswith(reason)


def test_every_sensor_says_here_whether_it_can_be_used() -> None:
    choice = available_sensors(probe=True)
    assert {"cores", "copy"} <= {sensor.name for sensor in choice.sensors}
    assert all(choice.refused.values())


def test_the_active_probe_must_be_asked_for() -> None:
    assert "copy" not in [sensor.name for sensor in available_sensors(probe=False).sensors]


def test_no_sensor_imports_torch() -> None:
    code = "import sys, torch_tiers.monitor.build; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ------------------------------------------------------------------------------------------------------ rates


def test_a_rate_needs_two_counts() -> None:
    rate = Rate()
    assert [rate(at, total) for at, total in ((0, 100), (2, 300))] == [None, 100]


@pytest.mark.parametrize("later", [(10, 0), (10, 200), (9, 200), (11, 50)])
def test_where_clock_or_counter_go_back_there_is_no_rate(later: tuple[float, float]) -> None:
    rate = Rate()
    rate(10, 100)
    assert rate(*later) is None
    assert rate(later[0] + 1, later[1] + 5) == 5


# ---------------------------------------------------------------------------------------------------- resctrl


def domain(root: Path, group: str, number: int, count: object) -> None:
    write(root / group / f"mon_data/mon_L3_0{number}/mbm_total_bytes", f"{count}\n")


def test_resctrl_adds_domains_and_groups_up(tmp_path: Path) -> None:
    sensor = Resctrl(tmp_path, Ticks())
    for count in (0, 1000):
        domain(tmp_path, "", 0, count)
        domain(tmp_path, "", 1, 2 * count)
        domain(tmp_path, "group", 0, 3 * count)
        reading = sensor.read()
    assert sensor.why_not() is None
    assert values(reading) == {"traffic": 6000}


def test_resctrl_waits_while_the_hardware_counts_anew(tmp_path: Path) -> None:
    domain(tmp_path, "", 0, "Unavailable")
    assert Resctrl(tmp_path).read() is None


def test_resctrl_that_vanishes_raises(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no counters"):
        Resctrl(tmp_path).read()


@pytest.mark.parametrize(("made", "reason"), [(False, "container"), (True, "mount -t resctrl")])
def test_resctrl_says_why_not(tmp_path: Path, made: bool, reason: str) -> None:
    root = tmp_path / "resctrl"
    if made:
        root.mkdir()
    assert reason in str(Resctrl(root).why_not())


# ----------------------------------------------------------------------------------------------------- uncore


def controller(root: Path, number: int) -> None:
    folder = root / f"uncore_imc_{number}"
    write(folder / "type", f"{20 + number}\n")
    write(folder / "cpumask", "0,32\n")
    for event, umask in (("cas_count_read", 3), ("cas_count_write", 12)):
        write(folder / "events" / event, f"event=0x04,umask={umask:#04x}\n")
        write(folder / "events" / f"{event}.scale", "6.103515625e-5\n")
        write(folder / "events" / f"{event}.unit", "MiB\n")


def test_uncore_counters_are_found_for_every_controller_and_socket(tmp_path: Path) -> None:
    controller(tmp_path, 0)
    controller(tmp_path, 1)
    found = list(find_counters(tmp_path))
    assert len(found) == 8
    assert found[0] == Counter(type=20, config=0x0304, core=0, scale=64.0)
    assert {counter.core for counter in found} == {0, 32}


def test_uncore_configurations_are_read_as_the_kernel_writes_them() -> None:
    assert parse_config("event=0x04,umask=0x0f\n") == 0x0F04
    assert parse_config("event=0xff,umask=0x20") == 0x20FF


def test_uncore_says_why_not(tmp_path: Path) -> None:
    assert "virtual machines" in str(Uncore(tmp_path).why_not())
    controller(tmp_path, 0)
    write(tmp_path / "uncore_imc_0/type", "4294967295\n")  # of no such device
    assert "CAP_PERFMON" in str(Uncore(tmp_path).why_not())


# ------------------------------------------------------------------------------------------------------- PCIe


def nvml(gpus: int = 2, fail: str = "") -> Any:
    def throughput(gpu: int, way: int) -> int:
        return (gpu + 1) * (1000 if way == 1 else 10)

    def start() -> None:
        if fail:
            raise RuntimeError(fail)

    return SimpleNamespace(
        NVML_PCIE_UTIL_RX_BYTES=1,
        NVML_PCIE_UTIL_TX_BYTES=0,
        nvmlInit=start,
        nvmlDeviceGetCount=lambda: gpus,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetPcieThroughput=throughput,
    )


def test_pcie_adds_the_gpus_up() -> None:
    sensor = Pcie(nvml())
    assert sensor.why_not() is None
    assert values(sensor.read()) == {"rx": 3000 * 1024, "tx": 30 * 1024}


def test_pcie_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Pcie(nvml(gpus=0)).why_not() == "no GPU"
    assert Pcie(nvml(fail="driver not loaded")).why_not() == "driver not loaded"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Pcie().why_not() == "pip install nvidia-ml-py"


# --------------------------------------------------------------------------------------------------- pressure


def stalled(root: Path, where: str, microseconds: int) -> None:
    write(root / where, f"some avg10=0.00 avg60=0.00 avg300=0.00 total={microseconds}\nfull avg10=0 total=7\n")


def test_pressure_is_the_part_of_the_time_that_somebody_waited(tmp_path: Path) -> None:
    stalled(tmp_path, "proc/pressure/cpu", 0)
    stalled(tmp_path, "proc/pressure/memory", 0)
    sensor = Pressure(tmp_path, Ticks())
    assert sensor.why_not() is None
    assert sensor.read() is None
    stalled(tmp_path, "proc/pressure/cpu", 250_000)
    assert values(sensor.read()) == {"cpu": 0.25, "memory": 0.0}


def test_pressure_is_that_of_the_own_cgroup_where_there_is_one(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "1:cpu:/elsewhere\n0::/mine\n")
    stalled(tmp_path, "proc/pressure/cpu", 0)
    stalled(tmp_path, "sys/fs/cgroup/mine/cpu.pressure", 0)
    sensor = Pressure(tmp_path, Ticks())
    sensor.read()
    stalled(tmp_path, "sys/fs/cgroup/mine/cpu.pressure", 500_000)
    assert values(sensor.read()) == {"cpu": 0.5}


def test_pressure_says_why_not(tmp_path: Path) -> None:
    assert "psi=1" in str(Pressure(tmp_path).why_not())
    (tmp_path / "proc/pressure/cpu").mkdir(parents=True)  # reading fails, as where it is switched off
    assert "cpu" in str(Pressure(tmp_path).why_not())


# ------------------------------------------------------------------------------------------------- timed copy


def test_the_timed_copy_is_judged_by_its_best() -> None:
    times = iter([k for n in range(20) for k in (10.0 * n, 10.0 * n + 1)] + [500.0, 502.0])
    sensor = TimedCopy(lambda: next(times))
    assert [values(sensor.read())["copy"] for _ in range(21)] == [1.0] * 20 + [0.5]


# ------------------------------------------------------------------------------------------------- own copies


def copies(lane: str, seconds: Iterable[float], nbytes: int = 64 * MiB) -> list[Transfer]:
    """One after the other, with a pause between them."""
    found, at = [], 0.0
    for took in seconds:
        found.append(Transfer(lane, nbytes, at, at + took))
        at += took + 1
    return found


def test_copies_are_compared_with_what_the_lane_can_do() -> None:
    sensor = Copies(Calibration(), Ticks())
    for _ in range(5):
        sensor.feed(copies("h2d", [1.0] * 4), {"h2d": 0})
        assert values(sensor.read())["h2d"] == 1.0
    sensor.feed(copies("h2d", [2.0] * 4), {"h2d": 0})
    assert values(sensor.read())["h2d"] == 0.5


def test_one_copy_that_was_held_up_says_nothing() -> None:
    sensor = Copies(Calibration({"h2d": 64.0 * MiB}), Ticks())
    sensor.feed(copies("h2d", [1.0, 1.0, 1.0, 50.0]), {})
    assert values(sensor.read())["h2d"] == 1.0


def test_copies_of_one_kind_are_taken_together() -> None:
    """Groups differ a little in size and speed; that is no contention."""
    sensor = Copies(Calibration(), Ticks())
    group = [Transfer("h2d", (60 + k) * MiB, 10.0 * k, 10.0 * k + (60 + k) / (50 + 2 * (k % 3))) for k in range(9)]
    for _ in range(8):
        sensor.feed(group, {})
        reading = values(sensor.read())
    assert reading["h2d"] > 0.99


def test_sizes_are_not_compared_with_one_another() -> None:
    sensor = Copies(Calibration(), Ticks())
    for _ in range(6):
        sensor.feed(copies("h2d", [1.0] * 4) + copies("h2d", [0.1] * 2, nbytes=2 * MiB), {})
        reading = values(sensor.read())
    assert reading["h2d"] == 1.0


def test_lanes_that_copy_at_once_are_compared_with_times_in_which_they_did_so() -> None:
    sensor = Copies(Calibration(), Ticks())
    for _ in range(6):
        sensor.feed(copies("h2d", [1.0] * 4), {})
        assert values(sensor.read()) == {"h2d": 1.0, "h2d.alone": 1.0}
    for _ in range(6):
        sensor.feed(copies("h2d", [1.25] * 4) + copies("d2h", [1.25] * 4), {})
        reading = values(sensor.read())
    assert (reading["h2d"], reading["h2d.alone"]) == (1.0, 0.8)


def test_copies_half_of_which_ran_beside_the_other_lane_tell_nothing() -> None:
    h2d, d2h = Transfer("h2d", MiB, 0.0, 1.0), Transfer("d2h", MiB, 0.7, 5.0)
    assert [copy for copy, _ in sound([h2d, d2h])] == [d2h]


def test_times_that_make_no_sense_are_left_out() -> None:
    assert not list(sound([Transfer("h2d", MiB, 1.0, 1.0), Transfer("h2d", MiB, 2.0, 1.0)]))


def test_what_is_moved_is_counted_by_lane_and_together() -> None:
    sensor = Copies(Calibration(), Ticks())
    for k in (0, 1):
        sensor.feed([], {"d2h": 100 * k, "disk_write": 10 * k, "gds_write": k})
        reading = values(sensor.read())
    assert reading == {"d2h.moved": 100, "disk_write.moved": 10, "gds_write.moved": 1, "ours": 110}, (
        "what crosses host memory"
    )


def test_iterations_that_nobody_reads_do_not_pile_up() -> None:
    sensor = Copies(Calibration(), Ticks())
    for _ in range(10_000):
        sensor.feed([], {})
    assert len(sensor._fed) < 100
