"""Every program of the zoo trains, and is bit for bit the same where tensors move; the command and its table."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from benchmarks import turns
from benchmarks.zoo import __main__ as command
from benchmarks.zoo.__main__ import Driver, Place, call, failure, shared_out
from benchmarks.zoo.program import PROGRAMS, Program, Unavailable, has_own, maker
from benchmarks.zoo.results import apart, in_turns, latest, read, table
from benchmarks.zoo.run import of_all_ranks, run
from tests.scenarios import bits, moved, moving
from torch_tiers.assembly import Session

STEPS = 3
WITH_A_PLAN = {"moe": 11}  # steps until some have run under a plan; rows of experts change from step to step
USUALLY = 5
AGAIN = {"fsdp": 0.0, "lstm": 0.2, "gan": 0.8}
"""Of the bytes that it saves what can be made again, where that is little.

FSDP's, those with oneDNN's workspace, and weights that a spectral norm makes of vectors that it writes over.
"""
GiB = 1 << 30


@pytest.fixture(autouse=True)
def _no_process_group() -> Iterator[None]:
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


def made(name: str, checkpoint: bool = False) -> Program:
    try:
        return maker(name)("cpu", "cpu", checkpoint)
    except Unavailable as error:
        pytest.skip(str(error))


def results(program: Program, steps: int) -> list[torch.Tensor]:
    """The losses, and what training left of weights and of the optimizers' moments, which gradients went into."""
    losses: list[torch.Tensor] = []
    program.train(steps, losses.append)
    assert all(math.isfinite(loss.item()) and not loss.requires_grad for loss in losses)
    assert all(p.grad is None for model in program.models for p in model.parameters()), "a step leaves no gradients"
    return [*losses, *program.state()]


@cache
def without_tiers(name: str) -> list[bytes]:
    return bits(results(made(name), WITH_A_PLAN.get(name, USUALLY)))


def sites(session: Session) -> int:
    """How many saved tensors are recomputed by plan."""
    saver = session.runtime.saver()
    assert saver is not None
    return sum(len(plan.recompute) for mover in saver.movers.armed for plan in mover.learner.plans)


def made_again(session: Session) -> float:
    """The part of all saved bytes that can be recomputed."""
    saver = session.runtime.saver()
    assert saver is not None
    traces = [trace for mover in saver.movers.armed for trace in mover.learner.traces]
    again = sum(life.nbytes for trace in traces for life in trace.lifetimes if life.ident in trace.recipes)
    return again / sum(trace.saved_bytes for trace in traces)


@pytest.mark.parametrize("recompute", [False, True], ids=["moved", "recomputed"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_the_same_where_tensors_move(name: str, recompute: bool) -> None:
    plain = without_tiers(name)
    with moving(room=0, share=2 / 3, recompute=recompute) as session:
        ours = bits(results(made(name), WITH_A_PLAN.get(name, USUALLY)))
        used = moved(session)["h2d"] + (sites(session) if recompute else 0)
    assert [k for k, pair in enumerate(zip(ours, plain, strict=True)) if pair[0] != pair[1]] == []
    assert used > 0, "nothing was moved or recomputed, so nothing was tested"


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_the_same_where_all_is_made_again_by_the_operators_that_made_it(name: str) -> None:
    plain = without_tiers(name)
    with moving(room=0, share=0, recompute=True) as session:
        ours = bits(results(made(name), WITH_A_PLAN.get(name, USUALLY)))
        part = made_again(session)
        print(f"{name}: {part:.2f} of the saved bytes can be made again")
    assert [k for k, pair in enumerate(zip(ours, plain, strict=True)) if pair[0] != pair[1]] == []
    assert part >= AGAIN.get(name, 0.9)


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_has_a_checkpointing_of_its_own(name: str) -> None:
    if not has_own(name):
        pytest.skip("it is checkpointed as it is")
    program, saved = made(name, checkpoint=True), [0, 0]

    def packed(tensor: torch.Tensor) -> torch.Tensor:
        saved[-1] += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(packed, lambda tensor: tensor):
        results(program, 1)
        saved.append(0)
        results(made(name), 1)
    assert saved[1] != saved[2], "it does not checkpoint anything"


def test_what_a_run_says() -> None:
    told = run(made("gpt"), STEPS, cuda=False)
    assert len(told["losses"]) == len(told["times"]) == STEPS
    assert told["ms"] == pytest.approx(sorted(told["times"])[1], abs=0.01)
    weights = sum(p.nbytes for p in made("gpt").models[0].parameters())
    assert 3 * weights <= told["state"] < 3.1 * weights, "AdamW keeps two moments beside each weight"
    again = run(made("gpt"), STEPS, cuda=False)
    assert again["losses"] == told["losses"], "the program does not equal itself"


def test_what_a_run_says_of_ranks() -> None:
    told = run(made("fsdp"), STEPS, cuda=False)
    assert of_all_ranks(told) == told
    assert not distributed.is_initialized()


def test_there_are_no_others() -> None:
    with pytest.raises(ValueError, match="there is no program gtp"):
        maker("gtp")


def test_they_take_turns_as_workloads_do(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[Any] = []
    monkeypatch.setattr(turns, "_train", lambda job, *_: trained.append(job.step().item()))
    turns.work("zoo.lstm", "cpu", tiny=True, commands=None, answers=None)  # type: ignore[arg-type]
    assert trained == [made("lstm").step().item()]


def test_where_losses_part() -> None:
    one, other = [(1.0).hex(), (2.0).hex(), (4.0).hex()], [(1.0).hex(), (2.5).hex(), (4.0).hex()]
    assert apart(one, one) is None
    assert apart(one, other) == (2, 0.25)
    assert apart([math.nan.hex()], [math.nan.hex()]) is None
    assert apart([(1.0).hex()], [math.nan.hex()]) == (1, math.inf)


def test_the_table(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    known = {"program": "gpt", "size": "full", "steps": 60, "status": "ok", "error": ""}
    plain = {"ms": 200.0, "reserved": 20 * GiB, "state": 4 * GiB, "losses": [(2.0).hex(), (1.0).hex()]}
    ours = plain | {"ms": 250.0, "reserved": 12 * GiB, "budget": 15 * GiB, "predicted_ms": 200.0, "ideal_ms": 190.0}
    records = [
        known | plain | {"variant": "plain", "ms": 300.0},
        known | plain | {"variant": "plain"},  # a later one counts
        known | plain | {"variant": "again"} | {"device": "H100", "torch": "2.13", "clock": 1500, "host_us": 201.0},
        known | plain | {"program": "dpo", "variant": "plain"} | {"device": "H100", "torch": "2.13", "host_us": 250.0},
        known | plain | {"variant": "checkpoint", "ms": 400.0, "reserved": 5 * GiB},
        known | ours | {"variant": "75", "settled": 12},
        known | {"variant": "60", "status": "failed", "error": "out of memory"},
        known | ours | {"variant": "45", "losses": [(2.0).hex(), (1.5).hex()], "budget": 11 * GiB, "settled": 4},
        known
        | {"variant": "75 in turns", "ms": 250.0, "plain_ms": 200.0}
        | {"ratio": {"median": 1.25, "low": 1.0, "high": 2.0}},
        known | {"program": "bert", "variant": "plain", "status": "unavailable", "error": "no transformers"},
        known | plain | {"program": "vit", "variant": "plain", "size": "cpu"},  # of another size
    ]
    file.write_text("\n".join(map(json.dumps, records)) + '\n{"program": "dit", ')
    found = latest(read(file), "full", 60)
    lines = table(found, [75, 60, 45]).splitlines()
    assert [line for line in lines if line.startswith("| gpt")] == [
        "| gpt | 200.0 | 20.0 | 20% | 0.800 (12.0 / 15.0) | failed | ~0.800 (12.0 / 11.0, **over**) | 0.500 (25%) "
        "| 1.000 (100%) | 1.25, -, 1.25 | 0.95, -, 0.95 | 45%: from step 2, by 5.0e-01 |"
    ]
    told = "1500 to 1500 MHz when runs ended; 201 to 250 us of the host for a fixed piece of the interpreter's work"
    assert f"On H100, torch 2.13; {told}." in lines
    assert set(lines[-2:]) == {"- gpt, 60%: failed: out of memory", "- bert, plain: unavailable: no transformers"}
    assert in_turns(found).splitlines()[-1] == "| gpt | 75% | 200.0 | 250.0 | 0.800 (0.500 to 1.000) |"
    assert in_turns({}) == ""


class Runs:
    """In the place of what starts processes: what each was asked for."""

    def __init__(self, state: int = 0) -> None:
        self.asked: list[tuple[str, str, str, int | None]] = []
        self.state, self.fails, self.drifts = state, {("vit", "60")}, {"moe"}

    def __call__(self, words: list[str], environ: dict[str, str], log: Path, timeout: float) -> tuple[int, str]:
        log.write_text("Traceback\nRuntimeError: no room\nand so on\n")
        if "report" in words:
            told = {"peak": {"hbm": 3 * GiB}, "moved": {}, "iterations": 80, "steps": 40}
            why = {"predicted_s": 0.1, "ideal_s": 0.05}
            return 0, json.dumps(told | {"step_s": {"settled": {"steps": 14}}, "why": why})
        program = words[words.index("benchmarks.zoo.run") + 1]
        hbm = environ.get("TIERS_HBM")
        budget = int(hbm) if hbm else None
        kind = "checkpoint" if "--checkpoint" in words else "tiers" if budget else "plain"
        assert (f"--nproc-per-node={len(environ['CUDA_VISIBLE_DEVICES'].split(','))}" in words) == (program == "ddp")
        self.asked.append((program, kind, environ["CUDA_VISIBLE_DEVICES"], budget))
        if (program, "60") in self.fails and budget:
            return 1, ""
        loss = 2.0 if program in self.drifts and budget else 1.0
        told = {"losses": [loss.hex()], "ms": 100.0, "reserved": 10 * GiB, "state": self.state}
        return 0, json.dumps(told)


def driver(out: Path, until: float = math.inf, **how: Any) -> Driver:
    return Driver(out, "full", 40, [60], 100.0, until, **how)


def test_the_command_runs_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs()
    monkeypatch.setattr(command, "call", runs)
    monkeypatch.setattr(command, "lacking", lambda name: "it is not installed" if name == "hf_t5" else None)
    places = shared_out(["0", "5"], sorted(os.sched_getaffinity(0))[:1])
    first = driver(tmp_path)
    first.run(["gpt", "ddp", "hf_t5", "vit", "moe"], places)
    budget = 6 * GiB
    kinds_of_both = [("plain", None), ("tiers", budget), ("checkpoint", None)]
    assert runs.asked[:3] == [("ddp", kind, "0,5", hbm) for kind, hbm in kinds_of_both], "what needs both is first"
    for name, kinds in [("gpt", []), ("vit", []), ("moe", ["plain"])]:  # once more where losses differ
        of = [one for one in runs.asked if one[0] == name]
        assert [kind for _, kind, *_ in of] == ["plain", "tiers", "checkpoint", *kinds]
        assert len({gpu for _, _, gpu, _ in of}) == 1, "all runs of a program share a GPU"
    ours = first.found["gpt", "60"]
    assert (ours["reserved"], ours["budget"], ours["predicted_ms"], ours["settled"]) == (3 * GiB, budget, 200.0, 14)
    failed = first.found["vit", "60"]
    assert (failed["status"], failed["error"]) == ("failed", "RuntimeError: no room")
    assert first.found["hf_t5", "plain"]["error"] == "it is not installed"

    before = len(runs.asked)
    driver(tmp_path).run(["gpt", "vit"], places)
    assert len(runs.asked) == before, "nothing is run twice"
    runs.fails.clear()
    driver(tmp_path, retry=True).run(["gpt", "vit"], places)
    assert [one[:2] for one in runs.asked[before:]] == [("vit", "tiers")]
    late = driver(tmp_path / "late", until=time.monotonic() - 1)
    late.run(["gpt"], places)
    assert late.found == {}, "none begins after the limit"


def test_a_budget_is_of_activations_where_much_is_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(state=4 * GiB)
    monkeypatch.setattr(command, "call", runs)
    driver(tmp_path).run(["gpt"], [Place(("0",), tuple(os.sched_getaffinity(0)))])
    assert [budget for *_, budget in runs.asked if budget] == [int((4 + 0.6 * 6) * GiB)]


def test_plain_and_tiers_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, compared = Runs(), list[str]()

    def call(words: list[str], environ: dict[str, str], log: Path, timeout: float) -> tuple[int, str]:
        if "benchmarks.allocators" not in words:
            return runs(words, environ, log, timeout)
        compared.append(words[words.index("--workload") + 1])
        assert words[words.index("--hbm") + 1] == str(6 * GiB)
        rows = [{"steps": [0.2]}, {"steps": [0.25], "ratio": {"median": 1.25, "low": 1.2, "high": 1.3}}]
        Path(words[words.index("--json") + 1]).write_text(json.dumps(rows))
        return 0, ""

    monkeypatch.setattr(command, "call", call)
    cores = os.sched_getaffinity(0)
    one = driver(tmp_path)
    for _ in range(2):  # and nothing twice
        one.in_turns(["gpt", "ddp"], Place(("0",), tuple(cores)))
    assert compared == ["zoo.gpt"]
    assert "| gpt | 60% | 200.0 | 250.0 | 0.800 (0.769 to 0.833) |" in in_turns(one.found)


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "call", Runs())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,5")
    words = [
        "--out",
        str(tmp_path / "new"),
        "--gpus",
        "1",
        "--programs",
        "gpt",
        "ddp",
        "--budgets",
        "60",
        "--steps",
        "40",
    ]
    monkeypatch.setattr(sys, "argv", ["zoo", *words])
    command.main()
    printed = capsys.readouterr()
    assert "| gpt | 100.0 | 10.0 | 0% | 1.000 (3.0 / 6.0) | 1.000 (100%) |  | 0.50 | 1.00 | equal |" in printed.out
    assert "programs on two GPUs are left out" in printed.err
    monkeypatch.setattr(sys, "argv", ["zoo", "--out", str(tmp_path), "--gpus", "0", "--alone"])
    with pytest.raises(SystemExit):
        command.main()


def test_a_run_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    assert call(["sh", "-c", "echo answer; echo error >&2; exit 5"], {}, log, 60) == (5, "answer\n")
    assert failure(5, log) == {"status": "failed", "error": "error"}
    began = time.monotonic()
    assert call(["sh", "-c", "echo answer; sleep 60"], {}, log, 0.2) == (None, "")
    assert time.monotonic() - began < 30
    assert failure(None, log)["status"] == "too long"


def test_an_interrupted_command_ends_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Driver, program: str, variant: str, budget: int | None, place: Place) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGTERM)
        code, _ = call(["sleep", "60"], {"PATH": os.environ["PATH"]}, self._log("sleep"), 60)
        return {"program": program, "variant": variant} | failure(code, self._log("sleep"))

    monkeypatch.setattr(Driver, "_variant", interrupted)
    monkeypatch.setattr(sys, "argv", ["zoo", "--out", str(tmp_path), "--programs", "gpt"])
    before, began = signal.getsignal(signal.SIGTERM), time.monotonic()
    command.main()
    assert time.monotonic() - began < 30
    assert signal.getsignal(signal.SIGTERM) is before
    assert read(tmp_path / "results.jsonl") == [], "it is no failure of the program"


def test_places_share_the_cores() -> None:
    assert shared_out(["0", "1"], [0, 1, 2, 3, 4]) == [Place(("0",), (0, 1)), Place(("1",), (2, 3))]
    assert shared_out([], [0, 1]) == [Place((), (0, 1))]
    assert shared_out(["0", "1"], [7]) == [Place(("0",), (7,)), Place(("1",), (7,))], "too few are shared"
