"""The benchmark of contention: what it prints and decides, and that its code runs, which tells nothing about speed."""

from __future__ import annotations

import io
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.contention import Cell, main, middle, promises, table
from benchmarks.loads import Copies, images_per_second, photographs
from examples.train_resnet import decode

COPIES = "copies at 120 GB/s"


def cells(*, on: float = 12.0, polite: float = 0.97, share: float = 0.125) -> list[Cell]:
    found = [Cell(0, COPIES, "alone", 0.0, 120.0)]
    for number in range(3):
        found += [Cell(number, "none", variant, 20.0, 0.0) for variant in ("plain", "off", "on")]
        found += [
            Cell(number, COPIES, "plain", 19.0, 110.0),
            Cell(number, COPIES, "off", 10.0, 90.0, moved=10.0),
            Cell(number, COPIES, "on", on, 110.0 * polite, moved=5.0, share=share),
        ]
    return found


def test_the_middle_of_the_rounds_counts() -> None:
    rounds = [Cell(k, "none", "on", rate, 0.0) for k, rate in enumerate((1.0, 30.0, 2.0))]
    assert middle(rounds, "none", "on", "training") == 2.0
    assert middle(rounds, "none", "off", "training") == 0.0


def test_the_table_gives_fractions_of_running_alone() -> None:
    row = next(line for line in table(cells()).splitlines() if line.startswith(COPIES))
    words = row.replace("|", " ").split()[4:]
    assert words == ["0.950", "0.500", "0.600", "120.0", "0.917", "0.750", "0.889", "1.200", "0.970", "0.12", "0.500"]


def test_what_is_promised_is_decided() -> None:
    assert all(holds for _, holds in promises(cells()))
    assert [holds for _, holds in promises(cells(on=10.5))].count(False) == 1
    assert [holds for _, holds in promises(cells(polite=0.9))].count(False) == 1
    assert all(holds for _, holds in promises(cells(on=10.0, share=1.0)))
    assert [holds for _, holds in promises(cells(on=9.5, share=1.0))].count(False) == 1
    unmeasured = [replace(cell, preprocessing=0.0) for cell in cells()]
    assert [holds for _, holds in promises(unmeasured)].count(False) == 1, "what was not measured does not hold"


def test_copies_keep_to_their_rate_and_stop_when_told() -> None:
    load = Copies(0.5e9, most=1)
    try:
        load.switch(True)
        load.begin()
        while not load.rate():
            time.sleep(0.01)
        load.begin()
        time.sleep(1.0)
        rate = load.rate()
        load.switch(False)
        time.sleep(0.3)
        load.begin()
        time.sleep(0.3)
        assert load.rate() == 0
    finally:
        load.close()
    assert 0.1 < rate < 0.7


@pytest.mark.parametrize("begin", [0.01, 0.2, 0.39])
@pytest.mark.parametrize("window", [1.8, 2.1])
def test_images_that_come_in_bursts_are_timed_by_whole_rounds(begin: float, window: float) -> None:
    """14 workers that take 0.4 s each, and bring theirs within 20 ms: to count them in 1.8 s tells 56 or 70."""
    every = [0.4 * burst + 0.0014 * worker for burst in range(20) for worker in range(14)]
    times = [came for came in every if begin <= came < begin + window]
    assert images_per_second(times, 14, begin + window) == pytest.approx(14 / 0.4, rel=1e-6)


def test_workers_that_stand_still_are_not_timed_by_what_they_did_before() -> None:
    assert images_per_second([0.0, 0.4, 0.8], 1, 2.4) == pytest.approx(3 / 2.4)
    assert images_per_second([0.3], 1, 1.0) == 0


def test_photographs_are_what_the_example_decodes() -> None:
    (encoded,) = photographs((48, 64), count=1)
    assert decode(encoded).shape == (48, 64, 3)
    assert np.array_equal(decode(encoded), decode(io.BytesIO(encoded).getvalue()))


def test_a_tiny_run_goes_through(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "contention.json"
    words = ["--tiny", "--settle", "3", "--window", "2", "--learning", "6", "--seconds", "0.2", "--json", str(path)]
    main(words)
    out = capsys.readouterr().out
    assert "training alone, samples/s" in out
    found = json.loads(path.read_text())["cells"]
    assert {(cell["load"], cell["variant"]) for cell in found} == {
        *((load, variant) for load in ("none", "jpeg, 1 workers", "copies at 1 GB/s") for variant in ("off", "on")),
        *((load, variant) for load in ("jpeg, 1 workers", "copies at 1 GB/s") for variant in ("alone", "plain")),
        ("none", "plain"),
    }
    assert all(cell["moved"] > 0 for cell in found if cell["variant"] in ("off", "on"))
    assert all(cell["host_us"] > 0 for cell in found if cell["variant"] == "on"), "the monitor was asked"
