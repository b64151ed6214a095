"""Every program of the zoo trains, and its losses are bit for bit the same where tensors move; the table of a run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.zoo.program import PROGRAMS, Program, Unavailable, maker
from benchmarks.zoo.results import apart, latest, read, table
from benchmarks.zoo.run import run
from tests.scenarios import moving

STEPS = 3
WITH_A_PLAN = {"moe": 11}  # steps until some have run under a plan; rows of experts change from step to step
USUALLY = 5


def made(name: str, checkpoint: bool = False) -> Program:
    try:
        return maker(name)("cpu", "cpu", checkpoint)
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_trains_and_is_the_same_where_tensors_move(name: str) -> None:
    program, steps = made(name), WITH_A_PLAN.get(name, USUALLY)
    plain = [program.step() for _ in range(steps)]
    assert all(math.isfinite(loss.item()) and not loss.requires_grad for loss in plain)
    assert all(p.grad is None for model in program.models for p in model.parameters()), "a step leaves no gradients"
    with moving(room=0, share=2 / 3) as session:
        program = made(name)
        losses = [program.step() for _ in range(steps)]
        stats = session.stats()
    assert [float(loss).hex() for loss in losses] == [float(loss).hex() for loss in plain]
    assert stats["moved"]["h2d"] > 0, "nothing moved, so nothing was tested"


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_has_a_checkpointing_of_its_own(name: str) -> None:
    program = made(name, checkpoint=True)
    assert math.isfinite(program.step().item())


def test_what_a_run_says() -> None:
    told = run(made("gpt"), STEPS, cuda=False)
    assert len(told["losses"]) == len(told["times"]) == STEPS
    assert told["ms"] == pytest.approx(sorted(told["times"])[1], abs=0.01)
    again = run(made("gpt"), STEPS, cuda=False)
    assert again["losses"] == told["losses"], "the program does not equal itself"


def test_there_are_no_others() -> None:
    with pytest.raises(ValueError, match="there is no program gtp"):
        maker("gtp")


def test_where_losses_part() -> None:
    one, other = [(1.0).hex(), (2.0).hex(), (4.0).hex()], [(1.0).hex(), (2.5).hex(), (4.0).hex()]
    assert apart(one, one) is None
    assert apart(one, other) == (2, 0.25)
    assert apart([math.nan.hex()], [math.nan.hex()]) is None
    assert apart([(1.0).hex()], [math.nan.hex()]) == (1, math.inf)


def test_the_table(tmp_path: Path) -> None:
    gib, file = 1 << 30, tmp_path / "results.jsonl"
    known = {"program": "gpt", "size": "full", "steps": 60, "status": "ok", "error": ""}
    plain = {"ms": 200.0, "reserved": 20 * gib, "losses": [(2.0).hex(), (1.0).hex()]}
    ours = plain | {"ms": 250.0, "reserved": 12 * gib, "budget": 15 * gib, "predicted_s": 0.2, "measured_s": 0.25}
    records = [
        known | plain | {"variant": "plain", "ms": 300.0},
        known | plain | {"variant": "plain"},  # a later one counts
        known | plain | {"variant": "again"},
        known | plain | {"variant": "checkpoint", "ms": 400.0, "reserved": 5 * gib},
        known | ours | {"variant": "75"},
        known | {"variant": "60", "status": "failed", "error": "out of memory"},
        known | ours | {"variant": "45", "losses": [(2.0).hex(), (1.5).hex()]},
        known | {"program": "bert", "variant": "plain", "status": "unavailable", "error": "no transformers"},
        known | plain | {"program": "vit", "variant": "plain", "size": "cpu"},  # of another size
    ]
    file.write_text("\n".join(map(json.dumps, records)) + '\n{"program": "dit", ')
    lines = table(latest(read(file), "full", 60), [75, 60, 45]).splitlines()
    assert lines[2:3] == [
        "| gpt | 200.0 | 20.0 | 0.800 (12.0 / 15.0) | failed | 0.800 (12.0 / 15.0) | 0.500 (25%) "
        "| 1.000 (100%) | 1.25, -, 1.25 | 45%: from step 2, by 5.0e-01 |"
    ]
    assert lines[-2:] == ["- gpt, 60%: failed: out of memory", "- bert, plain: unavailable: no transformers"]
