"""The benchmark of contention: what it prints and decides, and that its code runs, which tells nothing about speed."""

from __future__ import annotations

import io
import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.contention.__main__ import FEW, LONGEST, RECOVERY, Bench, main
from benchmarks.contention.loads import Copies, images_per_second, photographs
from benchmarks.contention.plain import Plain
from benchmarks.contention.report import NONE, Cell, middle, of_plain, promises, table
from benchmarks.contention.switch import Switch
from benchmarks.settling import Plans
from examples.train_resnet import decode
from torch_tiers.allocator.sizes import GiB
from torch_tiers.monitor.calibration import Calibration

COPIES = "copies at 120 GB/s"

Step = tuple[int, tuple[int, float, Plans]]  # from this step on: pages mapped, the monitor's share, plans


def cells(*, on: float = 12.0, polite: float = 0.97, share: float = 0.125) -> list[Cell]:
    found = [Cell(0, COPIES, "alone", 0.0, 120.0)]
    for number in range(3):
        host = number + 1.0  # which others use: nothing is compared but with what took turns with it
        found += [
            Cell(number, NONE, "off", 18.0 * host, 0.0, 20.0 * host),
            Cell(number, NONE, "on", 18.0 * host, 0.0, 20.0 * host),
            Cell(number, COPIES, "off", 10.0 * host, 88.0 * host, 20.0 * host, 110.0 * host, moved=4.0 * GiB),
            Cell(
                number,
                COPIES,
                "on",
                on * host,
                110.0 * polite * host,
                20.0 * host,
                110.0 * host,
                moved=2.0 * GiB,
                share=share,
            ),
        ]
    return found


def test_what_counts_is_the_part_of_what_plain_training_reaches_in_the_turns_between() -> None:
    assert of_plain(cells(), COPIES, "off", "preprocessing") == pytest.approx(0.8)
    assert of_plain(cells(), COPIES, "on", "training") == pytest.approx(0.6)
    assert of_plain(cells(), NONE, "on", "preprocessing") == 0.0, "which was not measured"
    assert middle(cells(), COPIES, ("off", "on"), "plain_training") == 40.0


def test_the_table_gives_these_parts() -> None:
    row = next(line for line in table(cells()).splitlines() if line.startswith(COPIES))
    words = row.replace("|", " ").split()[4:]
    assert words == ["40.00", "0.500", "0.600", "120.0", "220.0", "0.800", "0.970", "1.200", "0.12", "4.0", "2.0"]


def test_what_was_still_changing_is_told() -> None:
    found = [replace(cell, settled=(cell.round, cell.variant, cell.load) != (1, "on", COPIES)) for cell in cells()]
    (line,) = (line for line in table(found).splitlines() if "still changing" in line)
    assert line.endswith(f"{COPIES}, on, round 1")


def test_steps_that_something_held_up_are_told_with_what_it_may_have_been() -> None:
    """Two of 441 and 555 ms among sixteen of 280 made a cell 8% slower: somebody else's doing, and no page was mapped.

    The host is ahead of the device in the first steps of a turn, and waits for it in the last.
    """
    turns = (0.1, *[0.28] * 6, 0.46), (0.1, 0.28, 0.28, 0.28, 0.44, 0.28, 0.28, 0.46)
    mapped = Cell(1, COPIES, "on", 1.0, 1.0, steps=turns, pages={"maps": 95.0})
    alone = Cell(2, COPIES, "off", 1.0, 1.0, steps=turns, pages={"maps": 0.0})
    steady = Cell(0, COPIES, "off", 1.0, 1.0, steps=(turns[0], (*[0.03] * 5, 0.28, 0.28, 0.28 * 8 - 0.71)))
    told = [line for line in table([steady, mapped, alone]).splitlines() if line.startswith("held up")]
    assert told == [
        f"held up: {COPIES}, on, round 1: 440 ms; 95 pages mapped a step",
        f"held up: {COPIES}, off, round 2: 440 ms",
    ]


def test_what_is_promised_is_decided() -> None:
    assert all(holds for _, holds in promises(cells()))
    assert [holds for _, holds in promises(cells(on=10.5))].count(False) == 1
    assert [holds for _, holds in promises(cells(polite=0.9))].count(False) == 1
    assert all(holds for _, holds in promises(cells(on=10.0, share=1.0)))
    assert [holds for _, holds in promises(cells(on=9.5, share=1.0))].count(False) == 1
    slow = [
        replace(cell, lanes=(1.0, 1.0, 0.8, 0.8, 0.8, 0.9), reaction=9, recovery=57, monitor_cores=0.02)
        for cell in cells()
        if cell.variant == "on"
    ]
    assert {what.partition(",")[0] for what, holds in promises([*cells(), *slow]) if not holds} == {
        "beside copies at 120 GB/s it makes room 7",
        "after copies at 120 GB/s it leaves all there is in step 57",
        "the monitor's thread takes 2.0% of a core",
    }
    unmeasured = [replace(cell, preprocessing=0.0) for cell in cells()]
    assert [holds for _, holds in promises(unmeasured)].count(False) == 1, "what was not measured does not hold"


def test_a_monitor_that_does_not_make_room_beside_slow_lanes_does_not_pass() -> None:
    lanes = (1.0, 0.84, 0.84, 1.0, *[0.8] * 20)
    assert Cell(0, COPIES, "on", 1.0, 1.0, lanes=lanes).late == 20
    assert Cell(0, COPIES, "on", 1.0, 1.0, lanes=lanes, reaction=8).late == 4
    assert Cell(0, COPIES, "on", 1.0, 1.0, lanes=(1.0, 0.84, 0.84, 1.0)).late is None, "two readings that are off"
    looks = (1.0, 0.8, None, 0.8, None, None, 0.8, 0.9)
    assert Cell(0, COPIES, "on", 1.0, 1.0, lanes=looks).late == 7, "steps, though it did not look after each"
    assert Cell(0, COPIES, "on", 1.0, 1.0, lanes=(1.0, 0.8, None, None, 0.8, 1.0)).late is None, "one look is one"
    never = [replace(cell, lanes=lanes, share=1.0) for cell in cells() if cell.variant == "on"]
    assert any("20 steps after" in what and not holds for what, holds in promises(never))


def test_plain_training_takes_the_turns_that_it_is_told_to() -> None:
    plain = Plain("reference_gpt", tiny=True)
    try:
        plain.train(2)
        plain.train(1)
    finally:
        plain.close()


def test_who_waits_for_plain_training_is_told_of_its_end() -> None:
    plain = Plain("no_such_workload", tiny=True)
    try:
        with pytest.raises(RuntimeError, match="has ended"):
            plain.train(1)
    finally:
        plain.close()


def test_copies_keep_to_their_rate_and_stop_when_told() -> None:
    load = Copies(0.5e9, most=1)
    try:
        load.switch(True)
        begin = load.note()
        while not load.rate([(begin, load.note())]):
            time.sleep(0.01)
        spans = []
        for _ in range(2):  # which count together
            begin = load.note()
            time.sleep(0.5)
            spans.append((begin, load.note()))
        rate = load.rate(spans)
        load.switch(False)
        time.sleep(0.3)
        begin = load.note()
        time.sleep(0.3)
        assert load.rate([(begin, load.note())]) == 0
    finally:
        load.close()
    assert 0.1 < rate < 0.7


@pytest.mark.parametrize("begin", [0.01, 0.2, 0.39])
@pytest.mark.parametrize("span", [1.8, 2.1])
def test_images_that_come_in_bursts_count_by_what_of_their_making_lies_within(begin: float, span: float) -> None:
    """14 workers that take 0.4 s each, and bring theirs within 20 ms: to count them in 1.8 s tells 56 or 70."""
    times = [0.4 * burst + 0.0014 * worker for burst in range(20) for worker in range(14)]
    spans = [(begin, begin + span), (begin + 2 * span, begin + 3 * span)]
    assert images_per_second(times, 14, spans, 8.0) == pytest.approx(14 / 0.4, rel=1e-6)


def test_of_two_that_take_turns_each_has_its_own_images() -> None:
    """Beside one an image takes 0.2 s, beside the other 0.4: turns of 2 s begin and end within images."""
    times, now = [0.0], 0.0
    while now < 20.0:
        now += 0.2 if now % 4 < 2 else 0.4
        times.append(now)
    fast = images_per_second(times, 1, [(4.0 * k, 4.0 * k + 2) for k in range(4)], now)
    slow = images_per_second(times, 1, [(4.0 * k + 2, 4.0 * k + 4) for k in range(4)], now)
    assert fast == pytest.approx(5.0, rel=0.1)
    assert slow == pytest.approx(2.5, rel=0.1)


def test_workers_that_stand_still_are_not_timed_by_what_they_did_before() -> None:
    assert images_per_second([0.0, 0.4, 0.8], 1, [(0.0, 2.4)], 2.4) == pytest.approx(3 / 2.4)
    assert images_per_second([0.3], 1, [(0.0, 1.0)], 1.0) == 0


def test_photographs_are_what_the_example_decodes() -> None:
    (encoded,) = photographs((48, 64), count=1)
    assert decode(encoded).shape == (48, 64, 3)
    assert np.array_equal(decode(encoded), decode(io.BytesIO(encoded).getvalue()))


QUIET = 5


def at(
    step: int, *, maps: int = 0, share: float = 1.0, plan: str = "", coming: bool = False, stay: bool = True
) -> Step:
    return step, (maps, share, Plans((plan,), coming, stay))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("told", "steps"),
    [
        pytest.param([at(1)], 1 + QUIET, id="nothing changes"),
        pytest.param([at(1), at(5, maps=70), at(7, maps=90)], 7 + QUIET, id="a layout is made"),
        pytest.param([at(1), at(4, share=0.5), at(9, share=0.25)], 9 + QUIET, id="the monitor changes its mind twice"),
        pytest.param(
            [at(1), at(4, coming=True), at(40, plan="b")], None, id="a plan is made, and there is no end to it"
        ),
        pytest.param([at(1), at(4, coming=True), at(14, plan="b")], 14 + QUIET, id="a plan is made, and begun with"),
        pytest.param([at(1, stay=False), at(9)], 9 - 1 + QUIET, id="the plan was on trial"),
        pytest.param([at(k, maps=k) for k in range(99)], None, id="pages are mapped all the time"),
        pytest.param([at(k, share=1 / (1 + k % 2)) for k in range(99)], None, id="so does the monitor"),
    ],
)
def test_steps_are_timed_when_nothing_has_changed_for_some(
    told: list[Step], steps: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third round was 12% slower than the two before: its plan came after the steps that were to wait for it."""
    done = 0

    def step() -> None:
        nonlocal done
        done += 1

    def now() -> tuple[int, float, Plans]:
        return max((entry for entry in told if entry[0] <= done), key=lambda entry: entry[0])[1]

    class Monitored(Switch):
        share = property(lambda self: now()[1])  # type: ignore[assignment]

    monkeypatch.setattr("benchmarks.contention.__main__.plans", lambda session: now()[2])
    session = SimpleNamespace(stats=lambda: {"pages": {"maps": now()[0]}})
    bench = Bench(step, None, 8, settle=QUIET, window=8, turns=3)  # type: ignore[arg-type]
    settled, *_ = bench.settle(session, Monitored(Calibration({})))  # type: ignore[arg-type]
    assert (settled, done) == ((True, steps) if steps else (False, LONGEST * QUIET))


@pytest.mark.parametrize(("on", "share", "steps"), [(False, 1.0, FEW), (True, 1.0, 40), (True, 0.25, FEW)])
def test_what_the_monitor_may_yet_see_is_waited_for(
    on: bool, share: float, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that do not rest are seen after some twenty steps, and then plans change."""
    done = 0

    def step() -> None:
        nonlocal done
        done += 1

    class Monitored(Switch):
        pass

    Monitored.share = share  # type: ignore[assignment, method-assign]
    switch = Monitored(Calibration({}))
    switch.set(on)
    monkeypatch.setattr("benchmarks.contention.__main__.plans", lambda session: Plans((), False, True))
    session = SimpleNamespace(stats=lambda: {"pages": {"maps": 0}})
    bench = Bench(step, None, 8, settle=40, window=8, turns=3)  # type: ignore[arg-type]
    bench.settle(session, switch)  # type: ignore[arg-type]
    assert done == 1 + steps


def test_it_is_counted_when_the_monitor_makes_room_and_when_it_no_longer_does(monkeypatch: pytest.MonkeyPatch) -> None:
    done = 0

    def step() -> None:
        nonlocal done
        done += 1

    class Monitored(Switch):
        share = property(lambda self: 0.5 if 4 <= done < 30 else 1.0)  # type: ignore[assignment]

        def look(self) -> float | None:
            return 1 / done

    monkeypatch.setattr("benchmarks.contention.__main__.plans", lambda session: Plans((), False, True))
    session = SimpleNamespace(stats=lambda: {"pages": {"maps": 0}})
    bench = Bench(step, None, 8, settle=QUIET, window=8, turns=3)  # type: ignore[arg-type]
    switch = Monitored(Calibration({}))
    assert bench.settle(session, switch) == (True, [1, 1 / 2, 1 / 3, 1 / 4], 4)  # type: ignore[arg-type]
    before = done
    assert bench.recover(switch) == 30 - before
    monkeypatch.setattr(Monitored, "share", 0.5)
    assert bench.recover(switch) == RECOVERY


def test_plain_has_its_turn_when_the_device_is_through_with_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """In slices of the device's time our last copies looked slow: the monitor made room beside nobody, for 0.7 s."""
    events: list[str] = []

    def step() -> SimpleNamespace:
        events.append("ours")
        return SimpleNamespace(item=lambda: events.append("through"))

    plain = SimpleNamespace(train=lambda steps: events.append("plain"))
    stats = {"moved": {}, "stalls": {}, "pages": None, "flushes": 0}
    monkeypatch.setattr(Bench, "settle", lambda *_: (step() is not None, [], None))
    bench = Bench(step, plain, 8, settle=QUIET, window=2, turns=2)  # type: ignore[arg-type]
    bench.cell(0, None, "off", SimpleNamespace(stats=lambda: stats), Switch(Calibration({})))  # type: ignore[arg-type]
    before_plain = [events[k - 1] for k, event in enumerate(events) if event == "plain"]
    assert before_plain == ["through"]


def test_a_tiny_run_goes_through(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "contention.json"
    words = ["--tiny", "--settle", "3", "--window", "2", "--turns", "2", "--learning", "6", "--seconds", "0.2"]
    main([*words, "--json", str(path)])
    out = capsys.readouterr().out
    assert "keeps" in out
    found = json.loads(path.read_text())["cells"]
    loads = ("none", "jpeg, 1 workers", "copies at 1 GB/s")
    assert {(cell["load"], cell["variant"]) for cell in found} == {
        *((load, variant) for load in loads for variant in ("off", "on")),
        *((load, "alone") for load in loads[1:]),
    }
    ours = [cell for cell in found if cell["variant"] != "alone"]
    assert all(cell["moved"] > 0 and cell["training"] > 0 and cell["plain_training"] > 0 for cell in ours)
    assert all(cell["host_us"] > 0 for cell in found if cell["variant"] == "on"), "the monitor was asked"
