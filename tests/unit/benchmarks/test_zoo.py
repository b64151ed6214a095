"""Every program of the zoo trains, and is bit for bit the same where tensors move; the command and its table."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from benchmarks import turns
from benchmarks.zoo import __main__ as command
from benchmarks.zoo.__main__ import Place, shared_out
from benchmarks.zoo.program import PROGRAMS, Program, Unavailable, has_own, maker
from benchmarks.zoo.results import read, table, write
from benchmarks.zoo.run import of_all_ranks, run
from tests.scenarios import bits, moved, moving
from tests.unit.by_hand import eventually
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


def test_the_table(tmp_path: Path) -> None:
    def row(fraction: float | None, **more: Any) -> dict[str, Any]:
        spread = None if fraction is None else {"median": fraction, "low": fraction, "high": fraction}
        known = {"step": {"median": 0.2}, "memory": 12 * GiB, "over": False, "settled": True, "losses": "equal"}
        return known | {"reason": "", "fraction": spread} | more

    own = row(0.5, memory=5 * GiB)
    own["fraction"]["low"] = 0.4
    rows = {
        "plain": row(1.0, memory=20 * GiB, losses=""),
        "tiers auto at 60%": row(0.8, settled=False, over=True),
        "tiers auto at 45%": row(None, reason="ended with code 1: no room", losses=""),
        "own checkpointing": own,
    }
    told = {"ideal_s": 0.19, "predicted_s": 0.24, "measured_s": 0.276}
    known = {"error": "", "state": 4 * GiB, "device": "H100", "torch": "2.13", "clock": 1500, "host_us": 201.0}
    drifts = {"plain": rows["plain"], "tiers auto at 60%": row(0.9, losses="differ from the 2nd on, by up to 5.0e-01")}
    found = {
        "gpt": known | {"rows": rows, "predicted": {"tiers auto at 60%": told}},
        "vit": known | {"rows": drifts, "host_us": 250.0},
        "bert": {"error": "no transformers"},
    }
    write(tmp_path / "results.json", found)
    assert read(tmp_path / "results.json") == found and read(tmp_path / "none.json") == {}
    lines = table(found).splitlines()
    assert (
        "| gpt | 200.0 | 20.0 | 20% | ~0.800 (60%, **over**) | failed | 0.500 (0.400 to 0.500, 25%) | equal |" in lines
    )
    parted = "tiers auto at 60%: differ from the 2nd on, by up to 5.0e-01"
    assert f"| vit | 200.0 | 20.0 | 20% | 0.900 (60%) |  |  | {parted} |" in lines
    assert "| gpt | tiers auto at 60% | 200.0 | 190.0 (-5%) | 240.0 | 276.0 (+15%) |" in lines
    assert "Predictions are 15.0% off in the median, 15% at most; 1 of 1 by more than 10%." in "\n".join(lines)
    about = (
        "1500 to 1500 MHz when plain runs ended; 201 to 250 us of the host for a fixed piece of the interpreter's work"
    )
    assert f"On H100, torch 2.13; {about}." in lines
    assert lines[-2:] == ["- bert: no transformers", "- gpt, tiers auto at 45%: ended with code 1: no room"]


def stand_in(folder: Path) -> Path:
    """A Python that stands in for `tiers bench` of a program: it notes how it was started, and says what one would."""
    known = {"over": False, "settled": True, "reason": "", "losses": "equal", "memory": 10 * GiB}
    rows = [
        known | {"variant": "plain", "step": {"median": 0.1}, "fraction": dict.fromkeys(("median", "low", "high"), 1)}
    ]
    said = json.dumps({"program": "", "state": 0, "device": "cpu", "torch": "2.13", "clock": None, "host_us": 200.0})
    python = folder / "python"
    python.write_text(
        f"""#!{sys.executable}
import json, os, pathlib, sys, time
words = sys.argv[1:]
runs = pathlib.Path(words[words.index("--out") + 1])
asked = {{"words": words, "gpus": os.environ["CUDA_VISIBLE_DEVICES"], "at": time.monotonic()}}
with open({str(folder / "asked.jsonl")!r}, "a") as file:
    file.write(json.dumps(asked) + "\\n")
if runs.name == "vit":
    sys.exit("tiers: the program as it is ended with code 1: no room")
if runs.name == "swin":
    time.sleep(60)
(runs / "0-plain").mkdir(parents=True, exist_ok=True)
(runs / "0-plain/output.txt").write_text("loss 1.0\\n" + {said!r} + "\\na library's last word")
print({json.dumps(rows)!r})
"""
    )
    python.chmod(0o755)
    return python


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[dict[str, Any]]]:
    """What benches were started, in their order."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(sys, "executable", str(stand_in(tmp_path / "bin")))
    file = tmp_path / "bin/asked.jsonl"
    return lambda: [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


Asked = Callable[[], list[dict[str, Any]]]


def zoo(monkeypatch: pytest.MonkeyPatch, out: Path, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["zoo", "--out", str(out), *words])
    command.main()


def test_each_program_is_a_bench_on_a_gpu_of_its_own_or_on_two(
    asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "lacking", lambda name: "it is not installed" if name == "hf_t5" else None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6")
    programs = ["--programs", "gpt", "ddp", "hf_t5", "vit", "lora"]
    zoo(monkeypatch, tmp_path / "out", "--gpus", "2", *programs, "--budgets", "60", "45", "--steps", "40")
    started = {Path(one["words"][one["words"].index("--out") + 1]).name: one for one in asked()}
    assert sorted(started) == ["ddp", "gpt", "lora", "vit"]
    assert asked()[0] is not None and started["ddp"]["gpus"] == "3,5", "what needs both is first"
    assert min(started.values(), key=lambda one: one["at"]) == started["ddp"]
    assert "--nproc-per-node=2" in started["ddp"]["words"] and started["gpt"]["gpus"] in ("3", "5")
    words = started["gpt"]["words"]
    assert words[words.index("--hbm") + 1] == "60%,45%"
    own = words[words.index("--variant") + 1]
    assert own.startswith("own checkpointing=") and own.endswith("zoo.run gpt --size full --steps 40 --checkpoint")
    printed = capsys.readouterr().out
    assert "| gpt | 100.0 | 10.0 | 0% |  | equal |" in printed
    assert "- vit: tiers: the program as it is ended with code 1: no room" in printed
    assert "- hf_t5: it is not installed" in printed


def test_without_time_nothing_begins_and_what_is_known_is_shown(
    asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    zoo(monkeypatch, tmp_path / "out", "--gpus", "0", "--programs", "gpt")
    words = asked()[0]["words"]
    assert words[words.index("--policy") + 1] == "move", "a CPU's memory has no budget"
    zoo(monkeypatch, tmp_path / "out", "--gpus", "0", "--programs", "gpt", "--limit", "0")
    assert len(asked()) == 1 and capsys.readouterr().out.count("| gpt |") == 2


def test_what_needs_two_gpus_is_left_out_on_one(
    asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    zoo(monkeypatch, tmp_path / "out", "--gpus", "1", "--programs", "ddp")
    assert "programs on two GPUs are left out" in capsys.readouterr().err and asked() == []


def test_an_interrupted_command_ends_what_runs(asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        assert eventually(lambda: bool(asked()))
        os.kill(os.getpid(), signal.SIGTERM)

    before, began = signal.getsignal(signal.SIGTERM), time.monotonic()
    threading.Thread(target=interrupt).start()
    zoo(monkeypatch, tmp_path / "out", "--gpus", "0", "--programs", "swin")
    assert time.monotonic() - began < 30
    assert signal.getsignal(signal.SIGTERM) is before
    assert read(tmp_path / "out/results.json") == {}, "it is no failure of the program"


def test_places_share_the_cores() -> None:
    assert shared_out(["0", "1"], [0, 1, 2, 3, 4]) == [Place(("0",), (0, 1)), Place(("1",), (2, 3))]
    assert shared_out([], [0, 1]) == [Place((), (0, 1))]
    assert shared_out(["0", "1"], [7]) == [Place(("0",), (7,)), Place(("1",), (7,))], "too few are shared"
