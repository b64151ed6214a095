"""The demo: its budget, what it makes of a run, and what it shows."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import demo as demo_module
from benchmarks.demo import Demo, DemoError, Training, choose_budget, main, read_stats, run_demo, train
from benchmarks.demo_report import bar, render
from tests.unit import warm
from torch_tiers.allocator.sizes import PAGE, MiB
from torch_tiers.migrator.model.links import LANES

STATS = {
    "device": "cpu",
    "allocator": "torch",
    "policy": "auto",
    "budget": {"hbm": 60 * MiB, "dram": 20 * MiB, "nvme": None},
    "iterations": 2,
    "steps": 2,
    "peak": {"hbm": 59 * MiB, "dram": 20 * MiB, "nvme": 0},
    "moved": dict.fromkeys(LANES, 0)
    | {"d2h": 80 * MiB, "h2d": 80 * MiB, "disk_write": 40 * MiB, "disk_read": 40 * MiB, "gds_write": 24 * MiB},
    "groups": 4,
    "stalls": {"read from disk": {"count": 3, "seconds": 0.0125}},
    "unmanaged_bytes": 0,
    "step_s": {"median": 0.1, "min": 0.1, "max": 0.2},
}


def demo(tiers_losses: list[str]) -> Demo:
    plain = Training(["5.5", "5.25"], [100.0, 120.0])
    return Demo(plain, Training(tiers_losses, [110.0, 130.0]), needed_hbm=100 * MiB, stats=STATS)


def shown(demo: Demo) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(render(demo))
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def test_equal_losses_are_said_to_be_equal() -> None:
    text = shown(demo(["5.5", "5.25"]))
    assert "All 2 losses are equal to the last bit" in text
    assert "59.0 MiB of HBM where 100.0 MiB were needed (59%)" in text


def test_a_peak_over_the_budget_is_explained() -> None:
    over = demo(["5.5", "5.25"])
    assert "over the budget" not in shown(over)
    over = replace(over, stats=STATS | {"peak": {"hbm": 61 * MiB, "dram": 0, "nvme": 0}})
    assert "1.0 MiB over the budget, which without a GPU is counted, not enforced" in shown(over)


def test_a_loss_that_differs_is_marked_and_counted() -> None:
    text = shown(demo(["5.5", "5.250000000001"]))
    assert "Only 1 of 2 losses are equal" in text
    assert "5.250000000001" in text


def test_peaks_budgets_lanes_times_and_stalls_are_shown() -> None:
    text = shown(demo(["5.5", "5.25"]))
    for expected in (
        *("60.0 MiB", "off", "d2h", "disk_read", "80.0 MiB", "20.0 MiB", *LANES, "24.0 MiB"),
        *("110.0 ms", "120.0 ms", "read from disk", "12.5 ms in 3 stalls"),
    ):
        assert expected in text


@pytest.mark.parametrize(
    ("part", "whole", "drawn"),
    [(0, 8, "    "), (8, 8, "████"), (4, 8, "██  "), (5, 8, "██▌ "), (99, 8, "████")],
)
def test_a_bar_is_as_long_as_its_part(part: int, whole: int, drawn: str) -> None:
    assert bar(part, whole, width=4) == drawn


def test_little_is_not_drawn_as_nothing() -> None:
    assert bar(1, 10**9, width=4) == "▏   "


def test_the_budget_leaves_too_little_dram_for_what_moves() -> None:
    hbm, dram = choose_budget(100 * MiB, None)
    assert hbm == 60 * MiB
    assert 0 < dram < 40 * MiB and dram % PAGE == 0
    assert choose_budget(100 * MiB, 200 * MiB) == (200 * MiB, PAGE)


def test_the_example_is_run_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERS_ALLOCATOR", "no such thing")  # the user's own settings do not reach it
    with warm.interpreter():
        training = train(2, tmp_path, {})
    assert len(training.losses) == len(training.step_ms) == 2
    assert float(training.losses[0]) > 5


def test_a_run_that_fails_says_with_which_settings_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "train.py"
    broken.write_text("raise SystemExit('the disk is on fire')")
    monkeypatch.setattr(demo_module, "EXAMPLE", broken)
    with pytest.raises(DemoError, match=r"(?s)TIERS_HBM=1 ended .* after 0 of 3 steps.*disk is on fire"):
        train(3, tmp_path, {"TIERS_HBM": "1"})


def test_it_trains_plain_then_measured_then_within_the_budget_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs: list[Mapping[str, str]] = []

    def train(steps: int, scratch: Path, settings: Mapping[str, str]) -> Training:
        runs.append(settings)
        if "TIERS_RUN" in settings:
            assert "TIERS_HBM" not in settings or Path(settings["TIERS_NVME_PATH"]).is_dir()
            Path(settings["TIERS_RUN"]).mkdir()
            (Path(settings["TIERS_RUN"]) / "stats.json").write_text(json.dumps(STATS))
        return Training(["5.5"] * steps, [1.0] * steps)

    monkeypatch.setattr(demo_module, "train", train)
    seen = run_demo(2, None, Console(file=io.StringIO()))
    assert [run.get("TIERS_ALLOCATOR") for run in runs] == [None, "torch", "torch"]
    assert [run.get("TIERS_HBM") for run in runs] == [None, None, str(int(59 * MiB * 0.6))]
    assert seen.equal and seen.needed_hbm == 59 * MiB and seen.stats == STATS
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_statistics_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="scripts/setup"):
        read_stats(tmp_path)


@pytest.mark.parametrize(("losses", "code"), [(["5.5", "5.25"], 0), (["5.5", "5.0"], 1)])
def test_json_holds_everything_and_the_exit_code_tells_equality(
    losses: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_module, "run_demo", lambda *_: demo(losses))
    assert main(["--json"]) == code
    printed = json.loads(capsys.readouterr().out)
    assert printed["equal"] is (code == 0)
    assert printed["stats"] == STATS
    assert printed["tiers"]["losses"] == losses


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [("--hbm", "plenty", "'plenty' is not a size"), ("--steps", "0", "'0' is not a whole number above 0")],
)
def test_a_wrong_argument_is_refused_before_anything_runs(
    option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main([option, value])
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


def test_help_tells_the_default_budget(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    assert "60% of what is needed" in " ".join(capsys.readouterr().out.split())
