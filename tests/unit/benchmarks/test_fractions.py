"""The benchmark of fractions, without torch: what there is to measure, in which order, and what the tables say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fractions.__main__ import main as fractions_main
from benchmarks.fractions.cells import cells, code, parse
from benchmarks.fractions.driver import Run, compare
from benchmarks.fractions.largest import Largest, largest
from benchmarks.fractions.processes import Failed, Setting, TooLong
from benchmarks.fractions.results import Record, Results, fits
from benchmarks.fractions.table import fractions, newest, show, simulator
from torch_tiers.migrator.policies import POLICIES

GPU = "NVIDIA H100 80GB HBM3"
PLAIN = 1000
W = "reference_gpt"


# ------------------------------------------------------------------------------------------------ what there is


def test_every_policy_is_a_method_under_both_allocators() -> None:
    for policy in POLICIES:
        assert (parse(f"tiers:{policy}").policy, parse(f"tiers:{policy}").allocator) == (policy, "torch")
        assert (parse(f"pages:{policy}").policy, parse(f"pages:{policy}").allocator) == (policy, "pages")


def test_compiled_methods_say_what_is_compiled_and_with_which_budget() -> None:
    assert parse("tiers:auto+compile").compiled == parse("ideal+compile").compiled == "blocks"
    around = parse("pages:auto+compile:0.4")
    assert (around.allocator, around.policy, around.compiled, around.activation_budget) == (
        "pages",
        "auto",
        "blocks",
        0.4,
    )
    assert (parse("compile:0.4").kind, parse("compile:0.4").activation_budget) == ("ideal", 0.4)
    assert parse("compile-whole:0").compiled == parse("ideal+compile-whole").compiled == "whole"


@pytest.mark.parametrize(
    "name",
    ["magic", "tiers:magic", "tiers", "pages:auto+magic", "ideal+magic", "compile"]
    + [f"{name}:{share}" for name in ("compile", "pages:auto+compile") for share in ("x", "", "nan", "-1", "2")],
)
def test_an_unknown_method_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="there is no method"):
        parse(name)


def test_cells_come_in_the_order_given_and_what_no_budget_changes_comes_once() -> None:
    found = cells(["a", "b"], [75, 45], ["tiers:auto", "checkpoint", "tiers:auto"])
    assert [(cell.workload, cell.method.name, cell.budget) for cell in found] == [
        (workload, name, budget)
        for workload in "ab"
        for name, budget in (("tiers:auto", 75), ("tiers:auto", 45), ("checkpoint", None))
    ]


def test_a_compile_budget_is_several_measurements_from_the_most_memory_to_the_least() -> None:
    names = [cell.method.name for cell in cells(["a"], [75], ["compile-budget"])]
    assert names == ["ideal+compile", "compile:0.7", "compile:0.4", "compile:0.2", "compile:0"]


def test_the_code_of_ours_changes_with_the_runtime_and_that_of_peers_with_the_program_alone(tmp_path: Path) -> None:
    for name in ("benchmarks/workloads.py", "examples/train_gpt.py", "examples/train_resnet.py", "tiers/a.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)

    def both() -> tuple[str, str]:
        code.cache_clear()
        return code(ours=True, root=tmp_path), code(ours=False, root=tmp_path)

    before = both()
    (tmp_path / "tiers/a.py").write_text("other")
    runtime = both()
    assert runtime[0] != before[0] and runtime[1] == before[1]
    built = tmp_path / "tiers/CMakeFiles/CheckCXX/CMakeLists.txt"  # by an install in the tree
    built.parent.mkdir(parents=True)
    built.write_text("built")
    built.parents[2].joinpath("CMakeCache.txt").write_text("built")
    assert both() == runtime
    (tmp_path / "benchmarks/workloads.py").write_text("other")
    program = both()
    assert program[0] != runtime[0] and program[1] != runtime[1]
    code.cache_clear()


# ------------------------------------------------------------------------------------------------ the driver


@dataclass
class Fake:
    """Stands in for workers: steps by method, in seconds; what is an exception is raised."""

    steps: dict[str, Any] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)
    asked: list[tuple[str, int | None]] = field(default_factory=list)
    now: float = 0.0
    usable: bool = True
    settled: bool = True
    batch: int = 1

    def start(self, workload: str, setting: Setting, batch: int = 1) -> Fake:
        self.started.append(workload)
        self.usable, self.batch = True, batch
        return self

    def ask(self, method: str, hbm: int | None, timeout: float) -> Record:
        self.asked.append((method, hbm))
        step = self.steps.get(method, 0.1)
        if callable(step):
            step = step(self.batch)
        if isinstance(step, Failed):
            self.usable = False
            self.now += timeout if isinstance(step, TooLong) else 1
            raise step
        self.now += 10 * step
        return {
            "steps": [step] * 3,
            "losses": [2.0, 1.0],
            "reserved": PLAIN if hbm is None else hbm,
            "allocated": PLAIN,
            "sm_clock": 1980,
            "host_us": 250.0,
            "settled": self.settled,
            "batch": self.batch,
            "took": 10 * step,
        }

    def close(self) -> None:
        self.usable = False


def run(fake: Fake, results: Results, methods: list[str], seconds: float = 1000, **options: Any) -> list[str]:
    lines: list[str] = []
    one = Run(
        results,
        options.pop("machine", GPU),
        options.pop("setting", Setting()),
        seconds,
        start=fake.start,  # type: ignore[arg-type]
        clock=lambda: fake.now,
        say=lines.append,
        **options,
    )
    one.all(list(cells([W], [75, 50], methods)))
    return lines


def test_the_ideal_runs_before_and_after_each_method_and_budgets_are_of_what_it_reserves() -> None:
    fake, results = Fake({"tiers:auto": 0.125}), Results()
    run(fake, results, ["tiers:auto"])
    ideal = ("ideal", None)
    # The one in the middle is right after the first and right before the second.
    assert fake.asked == [ideal, ("tiers:auto", 750), ideal, ("tiers:auto", 500), ideal]
    assert fake.started == [W]
    assert [record["fraction"] for record in results.cells] == [pytest.approx(0.8)] * 2
    assert all(record["status"] == "ok" and record["plain_reserved"] == PLAIN for record in results.cells)


@pytest.mark.parametrize("late", [Failed("CUDA error"), TooLong("")])
def test_what_was_measured_is_kept_though_the_ideal_after_it_is_not(late: Failed) -> None:
    fake, results, calls = Fake({"tiers:auto": 0.125}), Results(), iter([0.1, late, 0.1, late])
    fake.steps["ideal"] = lambda batch: next(calls)
    run(fake, results, ["tiers:auto"])
    assert [record["fraction"] for record in results.cells] == [pytest.approx(0.8)] * 2


def test_our_allocator_gets_a_process_of_its_own_while_the_ideal_s_goes_on() -> None:
    log: list[str] = []

    class Named(Fake):
        def start(self, workload: str, setting: Setting, batch: int = 1) -> Fake:
            super().start(workload, setting)
            own = Named(started=self.started)
            name = f"process {len(self.started)}"
            log.append(f"{name} starts")
            measure = own.ask

            def ask(method: str, hbm: int | None, timeout: float) -> Record:
                log.append(f"{name} measures {method}")
                return measure(method, hbm, timeout)

            own.ask = ask  # type: ignore[method-assign]
            return own

    run(Named(), Results(), ["pages:auto"])
    # The third imports what it needs while the second measures.
    assert log == [
        *("process 1 starts", "process 1 measures ideal"),
        *("process 2 starts", "process 3 starts", "process 2 measures pages:auto", "process 1 measures ideal"),
        *("process 3 measures pages:auto", "process 1 measures ideal"),
    ]


def test_a_process_that_was_started_ahead_and_is_not_asked_is_closed() -> None:
    closed: list[int] = []

    class Late(Fake):
        def close(self) -> None:
            closed.append(len(self.started))
            super().close()

    fake = Late({"pages:auto": TooLong("")})
    assert run(fake, Results(), ["pages:auto"], seconds=70, timeout=600)[-1] == "2 cells are left for another run"
    assert len(closed) == len(fake.started) == 3


def test_what_was_measured_is_not_measured_again_until_the_code_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, results = Fake(), Results()
    run(fake, results, ["tiers:auto", "checkpoint"])
    before = len(fake.asked)
    run(fake, results, ["tiers:auto", "checkpoint"])
    assert len(fake.asked) == before
    monkeypatch.setattr("benchmarks.fractions.driver.code", lambda *, ours: "new" if ours else code(ours=False))
    run(fake, results, ["tiers:auto", "checkpoint"])
    assert [method for method, _ in fake.asked[before:]] == ["ideal"] + ["tiers:auto", "ideal"] * 2


def test_a_worker_that_dies_leaves_its_reason_and_a_new_one_goes_on() -> None:
    fake, results = Fake({"tiers:auto": Failed("OutOfMemoryError: no room")}), Results()
    run(fake, results, ["tiers:auto", "checkpoint"])
    assert [record["status"] for record in results.cells] == ["failed", "failed", "ok"]
    assert results.cells[0]["reason"] == "OutOfMemoryError: no room"
    assert len(fake.started) == 3


def test_what_failed_is_measured_again_only_on_request_and_what_was_skipped_always() -> None:
    fake, results = Fake({"tiers:auto": Failed("no")}), Results()
    run(fake, results, ["tiers:auto", "trl"])
    assert results.cells[-1]["reason"].startswith("not given")
    fake.steps.clear()
    run(fake, results, ["tiers:auto", "trl"], setting=Setting(trl=Path("offloading.py")))
    assert sorted(record["status"] for record in results.cells) == ["failed", "failed", "ok"]
    run(fake, results, ["tiers:auto"], retry=True)
    assert {record["status"] for record in results.cells} == {"ok"}


def test_what_had_not_settled_is_measured_again_only_on_request() -> None:
    fake, results = Fake(settled=False), Results()
    run(fake, results, ["tiers:auto"])
    fake.settled = True
    run(fake, results, ["tiers:auto"])
    assert not any(record["settled"] for record in results.cells)
    run(fake, results, ["tiers:auto"], retry=True)
    assert all(record["settled"] for record in results.cells)


def test_a_measurement_that_takes_too_long_fails_and_one_that_the_end_cuts_off_is_left_for_later() -> None:
    fake, results = Fake({"tiers:auto": TooLong("took more than 5 s")}), Results()
    run(fake, results, ["tiers:auto"], timeout=5)
    assert [record["reason"] for record in results.cells] == ["took more than 5 s"] * 2
    fake, results = Fake({"tiers:auto": TooLong("")}), Results()
    lines = run(fake, results, ["tiers:auto"], seconds=60, timeout=600)
    assert results.cells == []
    assert lines[-1] == "2 cells are left for another run"


def test_a_cell_that_does_not_fit_the_time_is_left_and_a_shorter_one_is_still_measured() -> None:
    fake, results = Fake({"tiers:auto": 20.0}), Results()
    run(fake, results, ["tiers:auto", "checkpoint"])
    for record in results.cells:
        record["code"] = "old"
    fake.asked.clear()
    run(fake, results, ["tiers:auto", "checkpoint"], seconds=100, machine=GPU)
    assert [method for method, _ in fake.asked] == ["ideal", "checkpoint", "ideal"]


def test_on_a_machine_without_a_gpu_what_needs_one_is_skipped_with_a_reason() -> None:
    results = Results()
    run(Fake(), results, ["save_on_cpu", "pages:auto", "checkpoint"], machine="cpu")
    assert [record["status"] for record in results.cells] == ["skipped", "skipped", "skipped", "ok"]


def test_the_best_so_far_runs_beside_auto_on_request() -> None:
    fake, results = Fake({"tiers:g10": 0.11, "tiers:move": 0.2}), Results()
    run(fake, results, ["tiers:g10", "tiers:move"])
    fake.asked.clear()
    run(fake, results, ["tiers:auto"], beside=True)
    assert [method for method, _ in fake.asked] == ["ideal"] + ["tiers:g10", "ideal", "tiers:auto", "ideal"] * 2


def test_losses_are_compared_step_by_step() -> None:
    measured = {"steps": [2.0], "losses": [2.0, 1.1]}
    ideal = {
        "steps": [1.0],
        "losses": [2.0, 1.0, 0.5],
        "sm_clock": None,
        "host_us": 250.0,
        "reserved": 1,
        "allocated": 1,
    }
    assert compare(measured, ideal, ideal)["loss_difference"] == pytest.approx(0.1)
    assert compare(measured, ideal, ideal)["ideal_loss_difference"] == 0


# ------------------------------------------------------------------------------------------------ the file


def test_a_file_is_read_back_and_a_new_measurement_takes_the_place_of_the_old(tmp_path: Path) -> None:
    path = tmp_path / "results" / "fractions.json"
    run(Fake(), Results(path), ["tiers:auto"])
    again = Results(path)
    assert len(again.cells) == 2
    again.put_cell(again.cells[0] | {"fraction": 0.5})
    assert sorted(record["fraction"] for record in Results(path).cells) == [0.5, 1.0]
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_files_are_merged_and_the_later_measurement_of_a_cell_stays() -> None:
    mine, theirs = Results(), Results()
    run(Fake(), mine, ["tiers:auto"])
    run(Fake(), theirs, ["tiers:auto", "checkpoint"])
    theirs.cells[0] |= {"when": "9999", "fraction": 0.3}
    theirs.cells[1] |= {"when": "0000", "fraction": 0.4}
    mine.merge(theirs)
    assert sorted(record["fraction"] for record in mine.cells) == [0.3, 1.0, 1.0]


def test_what_is_condensed_is_what_was_measured_last_without_its_steps(tmp_path: Path) -> None:
    path = tmp_path / "fractions.json"
    results = Results(path)
    for when, method, machine, hashed in (
        ("2026-01", "pages:auto", GPU, "a"),
        ("2026-02", "pages:auto", "another", "b"),
        ("2026-03", "checkpoint", GPU, "c"),
        ("2026-04", "checkpoint", "another", "c"),
    ):
        results.put_cell(record(method, None, 0.9, when=when, machine=machine, code=hashed, steps=[0.1], losses=[1.0]))
    fractions_main(["merge", str(path), "--newest"])
    kept = Results(path).cells
    assert [(one["when"], one["machine"]) for one in kept] == [
        ("2026-02", "another"),  # ours: the code changes
        ("2026-03", GPU),  # a peer is what it is on each card
        ("2026-04", "another"),
    ]
    assert not {"steps", "losses"} & set().union(*kept)


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"format": 99}')
    with pytest.raises(ValueError, match="name another file"):
        Results(path)


# ------------------------------------------------------------------------------------------------ the tables


def record(method: str, budget: int | None, fraction: float, reserved: int = 400, **more: Any) -> Record:
    return {
        "machine": GPU,
        "code": "c",
        "commit": None,
        "when": "2026",
        "workload": W,
        "budget": budget,
        "method": method,
        "compiled": parse(method).compiled,
        "status": "ok",
        "settled": True,
        "step": 0.1 / fraction,
        "worst": 0.2,
        "ideal_step": 0.1,
        "ideal_worst": 0.11,
        "fraction": fraction,
        "reserved": reserved,
        "allocated": reserved,
        "plain_reserved": PLAIN,
        "sm_clock": 1980,
        "ideal_sm_clock": 1900,
        "loss_difference": 0.0,
        "ideal_loss_difference": 0.0,
        **more,
    }


def test_a_peer_does_not_fit_where_it_reserves_more() -> None:
    assert fits(record("checkpoint", None, 0.8, 500), 50)
    assert not fits(record("checkpoint", None, 0.8, 501), 50)


def test_the_best_that_fits_is_marked_compiled_methods_apart() -> None:
    rows = fractions(
        [
            record("ideal", None, 1.0, PLAIN),
            record("tiers:auto", 75, 0.9, 700),
            record("tiers:move", 75, 0.95, 800),  # faster, but over its budget
            record("checkpoint", None, 0.8),
            record("ideal+compile", None, 1.2, 900),
            record("compile:0.4", None, 1.08, 700),
            record("compile:0", None, 0.9, 300),
        ]
    )
    by_name = {row[0]: row[1:] for row in rows}
    assert by_name["method"] == ["75%", "losses"]
    assert by_name["tiers:auto"][0].startswith("**0.900")
    assert by_name["tiers:move"][0].startswith("does not fit: 0.950")
    assert by_name["checkpoint"][0].startswith("0.800")
    assert by_name["compile-budget"][0].startswith("**1.080 (0.900 of compiled)")
    assert "compile:0.4" in by_name["compile-budget"][0]


def test_failures_and_the_blocks_that_were_checkpointed_are_told() -> None:
    failed = {**record("tiers:move", 75, 1.0), "status": "failed", "reason": "no plan fits"}
    rows = fractions([failed, record("checkpoint-k", 75, 0.9, blocks=7, settled=False)])
    assert rows[1][1] == "failed: no plan fits"
    assert rows[2][1] == "**0.900, 0.0 GiB, 7 blocks, not settled**"


def test_older_code_is_left_out_of_the_tables_and_counted() -> None:
    old = {**record("tiers:auto", 75, 0.5), "code": "b", "when": "2025"}
    new = [record("tiers:auto", 50, 0.9), {**record("checkpoint", None, 0.8), "code": "p"}]
    assert newest([old, *new]) == new
    results = Results()
    results.cells = [old, *new]
    assert "1 cells of older code are left out" in show(results)


def test_each_cell_can_be_shown_as_it_was_measured_last_marked_where_the_code_is_older() -> None:
    """Tables are filled over many sittings, and the code does not stand still for them."""
    results = Results()
    first = {**record("tiers:auto", 75, 0.5), "code": "b", "when": "2024"}
    results.cells = [
        first,
        {**record("tiers:auto", 75, 0.6), "code": "b", "when": "2025"},
        record("tiers:auto", 50, 0.9),
    ]
    text = show(results, latest=True)
    assert "0.600, 0.0 GiB †" in text and "0.900, 0.0 GiB**" in text
    assert "0.500" not in text
    assert "† measured with older code" in text


def test_the_simulator_s_errors_are_relative_to_what_was_measured() -> None:
    told = [
        record("tiers:auto", 75, 0.5, 100, predicted_step=0.22, predicted_peak=95),
        # Of its 200 bytes half lay in DRAM: that is no peak of HBM.
        {**record("pages:auto", 75, 0.5, 100, predicted_step=0.21, predicted_peak=1), "allocated": 200},
    ]
    _, row, _ = simulator([*told, record("checkpoint", None, 0.8)])
    assert row[:2] == [W, "2"]
    assert row[2:] == ["7.5%", "+10.0%", "5.0%", "-5.0%"]


def test_everything_is_shown_in_both_forms() -> None:
    results = Results()
    results.cells = [record("tiers:auto", 75, 0.9, predicted_step=0.1, predicted_peak=100)]
    results.tries = [tried("ideal", 8, 50.0), tried("tiers:auto", 16, 46.0), tried("tiers:auto", 24, None)]
    text = show(results, markdown=True)
    assert "| tiers:auto | 16 | 46.00 | 0.920 | 16: 46.00, 24: no room |" in text
    assert "SM clock 1900 to 1980 MHz" in text
    assert len(show(results).splitlines()) < len(text.splitlines())


def test_every_cell_can_be_shown_with_its_worst_step_and_what_it_moved() -> None:
    results = Results()
    moved = {"d2h": 2 << 30, "h2d": 1 << 30}
    predicted = {"predicted_step": 0.21, "predicted_peak": 3 << 30}
    results.cells = [record("tiers:auto", 75, 0.5, moved=moved, stalls={"h2d": 0.003}, learning=12, **predicted)]
    results.cells[0]["allocated"] = 2 << 30
    text = show(results, markdown=True, every=True)
    steps, sizes = "200.0 | 210.0 (+5.0%) | 200.0 | 100.0 | 110.0", "0.00 | 2.00 | 3.00 (+50.0%) | 2.00 | 1.00"
    assert f"| 75% | tiers:auto | {steps} | {sizes} | 3.0 | 12 | 1980 | 1900 |" in text


def tried(method: str, batch: int, speed: float | None) -> Record:
    return {**record(method, None, 1.0), "batch": batch, "speed": speed, "reason": "no room"}


# ------------------------------------------------------------------------------------------------ the largest batch


@pytest.mark.parametrize("limit", [8, 16, 24, 40, 56, 64, 72, 1000])
def test_the_largest_batch_is_found_by_growing_and_bisecting(limit: int) -> None:
    asked: list[int] = []

    def good(batch: int) -> bool:
        asked.append(batch)
        return batch <= limit

    assert largest(good, 8, 72) == min(limit, 72)
    assert all(batch % 8 == 0 and batch <= 72 for batch in asked)
    assert len(asked) == len(set(asked)) <= 8


def test_no_batch_at_all_may_be_good() -> None:
    assert largest(lambda batch: False, 8, 1024) == 0


@pytest.mark.parametrize("limit", [16, 24, 40])
def test_what_is_known_to_be_good_is_not_tried_again(limit: int) -> None:
    asked: list[int] = []
    assert largest(lambda batch: (asked.append(batch), batch <= limit)[1], 8, 1024, known=16) == limit  # type: ignore[func-returns-value]
    assert min(asked) == 24


def test_the_first_to_be_tried_can_be_named() -> None:
    assert largest(lambda batch: batch <= 900, 128, 4096, first=512) == 896
    assert largest(lambda batch: batch <= 300, 128, 4096, first=512) == 256


@pytest.mark.parametrize("first", [1, 7, 100, 129])
def test_one_that_is_no_multiple_becomes_one(first: int) -> None:
    asked: list[int] = []
    assert largest(lambda batch: (asked.append(batch), batch <= 92)[1], 8, 256, first=first) == 88  # type: ignore[func-returns-value]
    assert all(batch and batch % 8 == 0 for batch in asked)


def test_a_batch_is_good_within_a_tenth_of_the_ideal_s_best_speed_and_no_try_is_repeated() -> None:
    def seconds(limit: int, slower: float) -> Callable[[int], Any]:
        return lambda batch: Failed("OutOfMemoryError") if batch > limit else slower * batch / 100

    fake = Fake({"ideal": seconds(16, 1.0), "tiers:auto": seconds(64, 1.05), "tiers:move": seconds(64, 2)})
    results, methods = Results(), ["ideal", "tiers:auto", "tiers:move"]
    expected = ["ideal: largest batch 16", "tiers:auto: largest batch 64", "tiers:move: largest batch no more than 16"]
    assert search(fake, results, methods) == expected
    before = len(fake.asked)
    assert search(fake, results, methods) == expected
    assert len(fake.asked) == before


def test_who_is_too_slow_where_the_plain_program_still_trains_is_not_asked_for_more() -> None:
    """More than that took too long to tell a speed, and twice as much of the host's memory."""
    fake = Fake(
        {"ideal": lambda batch: batch / 100 if batch <= 16 else Failed("full"), "trl": lambda batch: batch / 24}
    )
    results = Results()
    assert search(fake, results, ["trl"])[-1] == "trl: largest batch no more than 16"
    assert [(record["batch"], record["speed"]) for record in results.tries if record["method"] == "trl"] == [(16, 24)]


def test_a_batch_that_took_too_long_is_tried_again_with_more_time() -> None:
    slow = Fake({"ideal": lambda batch: batch / 100 if batch <= 16 else Failed("full"), "trl": TooLong("75 s")})
    results = Results()
    assert search(slow, results, ["trl"], timeout=75)[-1] == "trl: largest batch no more than 16"
    before = len(slow.asked)
    slow.steps["trl"] = lambda batch: batch / 100 if batch <= 24 else Failed("full")
    assert search(slow, results, ["trl"], timeout=75)[-1] == "trl: largest batch no more than 16"
    assert len(slow.asked) == before
    assert search(slow, results, ["trl"], timeout=150)[-1] == "trl: largest batch 24"


def search(fake: Fake, results: Results, methods: list[str], timeout: float = 100) -> list[str]:
    """What is found of each method."""
    lines: list[str] = []
    Largest(
        results,
        GPU,
        Setting(trl=Path(__file__)),
        1000,
        timeout,
        start=fake.start,  # type: ignore[arg-type]
        clock=lambda: fake.now,
        say=lines.append,
    ).all(W, methods)
    return [line.partition(" ")[2] for line in lines if "largest" in line]
