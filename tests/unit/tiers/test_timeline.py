"""The timeline that a run leaves: what the lanes copied, steps and iterations, on one clock."""

from __future__ import annotations

import gzip
import json
import resource
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.scenarios import moving, perceptron, train
from tests.unit.tiers.test_activation import SMALL, START, stats_of, tiered
from tests.unit.trace_event_rules import broken
from torch_tiers import run_directory
from torch_tiers.migrator.telemetry.timeline import Timeline

STEPS = 8
LANES = ("d2h", "h2d", "disk_write", "disk_read")
COMMITTED = Path(__file__).parents[2] / "data" / "runs" / "mlp"


def timeline_of(directory: Path) -> dict[str, Any]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(gzip.decompress((directory / "timeline.json.gz").read_bytes()), parse_constant=refuse)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run in which everything moves, to disk for the most part."""
    directory = tmp_path_factory.mktemp("runs")
    disk = {"TIERS_DRAM": "4MiB", "TIERS_NVME": "64MiB", "TIERS_NVME_PATH": directory}
    train = START + f"for i in range({STEPS}): step(i)\n"
    done = tiered(train, TIERS_POLICY="move", TIERS_HBM=SMALL, TIERS_RUN=directory / "run", **disk)
    assert (done.returncode, done.stderr) == (0, "")
    return directory / "run"


def slices(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in timeline_of(run)["traceEvents"] if event["ph"] == "X" and event["cat"] == kind]


def test_a_fresh_run_and_an_earlier_one_are_by_the_rules_of_the_format(run: Path) -> None:
    assert broken(timeline_of(COMMITTED)) == []
    fresh = timeline_of(run)
    assert broken(fresh) == []
    assert {event["ph"] for event in fresh["traceEvents"]} == {"M", "X", "i", "C", "s", "f"}


def test_the_files_of_two_ranks_are_one_by_the_rules(run: Path) -> None:
    first, second = timeline_of(run)["traceEvents"], json.loads(Timeline(rank=1).to_json())["traceEvents"]
    ids = {event["id"] for event in first if event["ph"] == "s"}
    assert ids and {number >> 32 for number in ids} == {1}
    assert broken({"traceEvents": first + second}) == []


def test_what_is_in_use_is_told_of_every_tier_and_no_more_than_the_highest(run: Path) -> None:
    peaks, budget = stats_of(run)["peak"], stats_of(run)["budget"]["hbm"]
    counts = [event for event in timeline_of(run)["traceEvents"] if event["ph"] == "C"]
    for tier in ("dram", "nvme"):
        used = [event["args"]["in use"] for event in counts if event["name"] == tier]
        assert 0 < max(used) <= peaks[tier]
        assert used[-1] == 0  # at the end of an iteration
    hbm = [event["args"] for event in counts if event["name"] == "cpu hbm"]
    assert max(args["peak"] for args in hbm) == peaks["hbm"]
    assert {args["budget"] for args in hbm} == {budget}
    assert all(args["saved"] <= args["peak"] for args in hbm if "saved" in args)


@pytest.mark.parametrize("lane", LANES)
def test_copies_of_every_lane_are_told_and_no_more_bytes_than_were_moved(run: Path, lane: str) -> None:
    copies = slices(run, lane)
    assert 0 < sum(copy["args"]["bytes"] for copy in copies) <= stats_of(run)["moved"][lane]
    for copy in copies:
        assert copy["args"]["GB/s"] == pytest.approx(copy["args"]["bytes"] / copy["dur"] / 1e3, abs=1e-3)


@pytest.mark.parametrize(("kind", "noun"), [("steps", "step"), ("iterations", "iteration")])
def test_steps_and_iterations_follow_one_another_from_the_second_on(run: Path, kind: str, noun: str) -> None:
    found = slices(run, kind)
    assert [event["name"] for event in found] == [f"{noun} {number}" for number in range(2, STEPS + 1)]
    for first, second in pairwise(found):
        assert first["ts"] + first["dur"] == pytest.approx(second["ts"], abs=0.01)


def test_all_lie_on_one_clock(run: Path) -> None:
    """With each step something is copied both ways, and by its end all of that is back."""
    steps = slices(run, "steps")
    begin, end = steps[0]["ts"], steps[-1]["ts"] + steps[-1]["dur"]
    for step in steps:
        for lane in ("d2h", "h2d"):
            assert any(step["ts"] <= copy["ts"] < step["ts"] + step["dur"] for copy in slices(run, lane))
    for lane in ("d2h", "h2d", "disk_read"):
        assert all(copy["ts"] + copy["dur"] <= end for copy in slices(run, lane))
    for step, iteration in zip(steps, slices(run, "iterations"), strict=True):
        assert abs(step["ts"] - iteration["ts"]) < 0.1 * (end - begin)


def test_waits_are_those_that_stats_json_counts(run: Path) -> None:
    for cause, stall in stats_of(run)["stalls"].items():
        waits = [event["dur"] for event in slices(run, "waits") if event["name"] == cause]
        assert len(waits) == stall["count"]
        assert sum(waits) / 1e6 == pytest.approx(stall["seconds"], abs=1e-6 * len(waits))


def test_a_plan_that_was_adopted_is_told_with_what_it_comes_to(run: Path) -> None:
    instants = [event for event in timeline_of(run)["traceEvents"] if event["ph"] == "i"]
    plans = [event["args"] for event in instants if event["name"] == "plan by move"]
    assert plans and plans[0]["device"] == "cpu"
    assert "move in" in plans[0]["plan"] and "of hbm" in plans[0]["plan"]


def test_something_new_makes_the_program_be_learned_anew(tmp_path: Path) -> None:
    with moving(run=str(tmp_path)):
        train(perceptron(torch.device("cpu")), torch.device("cpu"), steps=6)
        train(perceptron(torch.device("cpu"), depth=2, width=64), torch.device("cpu"), steps=3, loss_of=narrow)
    assert [event["name"] for event in timeline_of(tmp_path)["traceEvents"]].count("learns anew") == 1


def narrow(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x[:, :64]).square().mean()


def test_without_a_run_directory_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a timeline was made")

    monkeypatch.setattr(Timeline, "__init__", refuse)
    with moving(room=0) as session:
        train(perceptron(torch.device("cpu")), torch.device("cpu"))
        assert session.stats()["moved"]["h2d"] > 0


def test_a_file_that_cannot_be_written_as_a_whole_is_left_as_it_was(tmp_path: Path) -> None:
    run_directory.write(tmp_path, {"steps": 1}, None, Timeline(), force=False)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    tiny = 64 * 1024
    endless = {"steps": list(range(100_000))}  # more than a file may have
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before_signal = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (tiny, hard))
        with pytest.raises(OSError, match="File too large"):
            run_directory.write(tmp_path, endless, None, Timeline(), force=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before_signal)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
