"""Did the loss change? Two runs' losses are compared bit for bit, and a run without tiers has some to compare with."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path

import pytest

from tests.unit.tiers.test_activation import SMALL, START, TRAIN, python, tiered
from torch_tiers.cli.main import main
from torch_tiers.migrator.model.fields import BadField
from torch_tiers.planning.losses import Losses, compare, losses_from_csv, render
from torch_tiers.run_directory import LOSSES, write_losses

ONE = [(1, 2.0), (1, 2.5), (2, 1.0), (2, 1.5)]


def text(one: Losses, other: Losses) -> str:
    return " ".join(render(compare(one, other)))


def test_equal_bits_are_told_with_how_many_were_compared() -> None:
    assert text(ONE, ONE) == "the loss is the same, bit for bit: 4 losses of 2 steps were compared"


def test_the_first_difference_is_told_with_its_backward_and_the_largest_too() -> None:
    told = text(ONE, [*ONE[:2], (2, 1.25), (2, 2.5)])
    assert told.startswith("the loss differs from step 2, backward 1 of it, on: 1.0, and 1.25 there")
    assert "there they are 0.25 (0.2 of the value) apart; the most, 1 (0.4 of the value), at step 2, backward 2" in told
    assert "2 of 4 losses of 2 steps differ" in told


def test_with_one_backward_a_step_no_backward_is_spoken_of() -> None:
    told = text([(1, 2.0), (2, 1.0)], [(1, 2.0), (2, 1.25)])
    assert told.startswith("the loss differs from step 2 on: 1.0, and 1.25 there") and "backward" not in told


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [(math.nan, math.nan, True), (0.0, -0.0, False), (math.inf, math.inf, True), (1.0, math.nan, False)],
)
def test_what_is_equal_is_asked_of_the_bits(one: float, other: float, same: bool) -> None:
    assert (compare([(1, one)], [(1, other)]).differ == 0) == same


def test_the_rest_of_a_longer_run_is_not_compared() -> None:
    assert text(ONE, ONE[:3]).endswith("one run has 4 losses, the other 3: what only one has is not compared")


def test_runs_that_accumulate_otherwise_are_compared_until_they_part() -> None:
    told = compare(ONE, [(1, 2.0), (2, 1.0)])
    assert (told.compared, told.parted) == (1, 1)
    assert "from step 1 on they do not call backward equally often" in text(ONE, [(1, 2.0), (2, 1.0)])


def test_every_number_that_is_written_is_read_again(tmp_path: Path) -> None:
    values = [(1, 0.1), (2, math.inf), (3, 5e-324), (4, -0.0), (5, math.nan)]
    write_losses(tmp_path, values)
    assert compare(losses_from_csv((tmp_path / LOSSES).read_text()), values).differ == 0


def test_without_a_loss_nothing_is_written(tmp_path: Path) -> None:
    write_losses(tmp_path / "run", [])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("content", ["", "loss,step\n", "step,loss\n1\n", "step,loss\n-1,2\n", "step,loss\n1,two\n"])
def test_what_no_run_has_written_is_refused(content: str) -> None:
    with pytest.raises(BadField):
        losses_from_csv(content)


# ---------------------------------------------------------------------------------------------- whole programs


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run without tiers."""
    directory = tmp_path_factory.mktemp("runs") / "plain"
    done = python(TRAIN, TIERS_ALLOCATOR="off", TIERS_RUN=directory, TIERS_HBM="1MiB")
    assert (done.returncode, done.stderr) == (0, "")
    return directory


def test_a_run_without_tiers_keeps_its_losses_and_nothing_else(plain: Path) -> None:
    printed = python(TRAIN).stdout.splitlines()
    assert [path.name for path in plain.iterdir()] == [LOSSES]
    kept = losses_from_csv((plain / LOSSES).read_text())
    assert kept == [(step, float.fromhex(line)) for step, line in enumerate(printed, 1)]


def test_a_run_with_tiers_has_the_losses_of_one_without(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = tiered(TRAIN, TIERS_HBM=SMALL, TIERS_RUN=tmp_path / "run")
    assert (done.returncode, done.stderr) == (0, "")
    assert main(["report", str(tmp_path / "run"), "--losses", str(plain)]) == 0
    assert "the loss is the same, bit for bit: 6 losses of 6 steps" in " ".join(capsys.readouterr().out.split())


def test_losses_that_differ_are_an_exit_code(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = python(TRAIN.replace("lr=0.1", "lr=0.2"), TIERS_ALLOCATOR="off", TIERS_RUN=tmp_path)
    assert done.returncode == 0, done.stderr
    assert main(["report", "--json", str(tmp_path), "--losses", str(plain)]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["equal"], told["compared"], told["first"]["step"]) == (False, 6, 2)


def test_the_report_of_a_run_without_tiers_says_what_it_is_good_for(
    plain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(plain)]) == 2
    said = capsys.readouterr().err
    assert f"tiers report RUN_DIR --losses {plain}" in said and said.count("\n") == 1


def test_a_run_without_tiers_is_kept_at_a_sigterm_and_in_the_way_of_the_next(tmp_path: Path) -> None:
    killed = START + "step(0)\nimport signal\nos.kill(os.getpid(), signal.SIGTERM)\n"
    done = python(killed, TIERS_ALLOCATOR="off", TIERS_RUN=tmp_path)
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, "")
    assert len(losses_from_csv((tmp_path / LOSSES).read_text())) == 1
    again = python(TRAIN, TIERS_ALLOCATOR="off", TIERS_RUN=tmp_path)
    assert again.returncode == 2 and "holds a losses.csv" in again.stderr


def test_with_force_nothing_of_an_earlier_run_stays_beside_the_losses(tmp_path: Path) -> None:
    (tmp_path / "stats.json").write_text("{}")
    done = python(TRAIN, TIERS_ALLOCATOR="off", TIERS_RUN=tmp_path, TIERS_RUN_FORCE=1)
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == [LOSSES]


def test_who_trains_nothing_leaves_nothing(tmp_path: Path) -> None:
    assert python(START, TIERS_ALLOCATOR="off", TIERS_RUN=tmp_path / "run").returncode == 0
    assert not (tmp_path / "run").exists()
