"""Alternating measurement: order, pairing, the interval, and the clock."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks.alternate import host_us, median_ratio, self_timed, sm_clock


def fake_nvidia_smi(directory: Path, body: str) -> None:
    program = directory / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)


def test_each_variant_runs_once_a_round_and_the_order_turns() -> None:
    ran: list[str] = []

    def run(name: str) -> float:
        ran.append(name)
        return float(len(ran))

    seconds = self_timed({name: partial(run, name) for name in "abc"}, rounds=3, warmup=1)
    assert "".join(ran) == "cab" + "abc" + "bca" + "cab"
    assert seconds == {"a": [4.0, 9.0, 11.0], "b": [5.0, 7.0, 12.0], "c": [6.0, 8.0, 10.0]}  # but for the warm-up


def test_a_drift_that_both_share_does_not_move_the_ratio() -> None:
    drift = np.linspace(1, 4, 50)
    ratio = median_ratio(list(1.1 * drift), list(drift))
    assert ratio.low == pytest.approx(1.1) and ratio.high == pytest.approx(1.1)


def test_the_interval_covers_the_true_ratio_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(7)
    covered = 0
    for seed in range(40):
        noise = rng.normal(1, 0.02, (2, 60))
        ratio = median_ratio(list(1.05 * noise[0]), list(noise[1]), seed=seed)
        covered += ratio.low <= 1.05 <= ratio.high
    assert covered >= 33


def test_the_same_seed_gives_the_same_interval() -> None:
    times, base = [1.0, 1.2, 0.9, 1.3], [1.0, 1.0, 1.1, 1.0]
    assert median_ratio(times, base) == median_ratio(times, base)


def test_rounds_that_do_not_pair_are_refused() -> None:
    with pytest.raises(ValueError, match="2 against 1"):
        median_ratio([1.0, 2.0], [1.0])


def test_the_clock_is_none_without_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sm_clock() is None


@pytest.mark.parametrize(("body", "clock"), [("echo 1980", 1980), ("echo '[N/A]'", None), ("exit 9", None)])
def test_the_clock_is_what_nvidia_smi_says(
    body: str, clock: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvidia_smi(tmp_path, body)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert sm_clock() == clock


def test_the_clock_is_that_of_the_gpu_which_the_program_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvidia_smi(tmp_path, "echo ${1#--id=}")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert (sm_clock(), sm_clock(1), sm_clock(2)) == (3, 1, None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert sm_clock(2) == 2


def test_the_host_is_timed_by_what_the_interpreter_does_in_no_time_at_all() -> None:
    assert 10 < host_us() < 100_000
