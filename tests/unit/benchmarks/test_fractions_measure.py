"""The benchmark of fractions at work, on the CPU: what each method does to a workload, and a process that is asked."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.fractions import measure
from benchmarks.fractions.__main__ import main
from benchmarks.fractions.cells import parse
from benchmarks.fractions.measure import AGAIN, STEADY, Bench, Lengths, fewest
from benchmarks.fractions.methods import blocks_of, load_trl, prepare
from benchmarks.fractions.processes import Failed, Setting, TooLong, Worker
from benchmarks.fractions.worker import serve
from benchmarks.workloads import reference_gpt, resnet152
from tests.unit import warm
from torch_tiers.allocator.errors import TiersError

SHORT = Lengths(warmup=1, timed=3, learning=(8, 30), settled=3)
TINY = partial(reference_gpt, "cpu", tiny=True)


def bench(**more: Any) -> Bench:
    return Bench(TINY, "64MiB", lengths=SHORT, **more)


@pytest.fixture
def warmly() -> Iterator[None]:
    """Workers are forked off a process that has imported torch, which each would do anew."""
    with warm.interpreter():
        yield


@pytest.mark.parametrize("build", [reference_gpt, resnet152], ids=lambda build: build.__name__)
def test_checkpointed_blocks_train_the_same_and_save_less(build: Any) -> None:
    saved: dict[str, int] = {}
    losses: dict[str, list[float]] = {}
    for name in ("ideal", "checkpoint-k", "checkpoint"):
        workload = build("cpu", tiny=True)
        with ExitStack() as stack:
            step = prepare(parse(name), workload, stack, blocks=1, trl=None)
            packed: list[torch.Tensor] = []
            with torch.autograd.graph.saved_tensors_hooks(lambda x, to=packed: to.append(x) or x, lambda x: x):
                workload.forward()
            saved[name] = len(packed)
            losses[name] = [step().item() for _ in range(3)]
    assert saved["ideal"] > saved["checkpoint-k"] > saved["checkpoint"]
    if build is reference_gpt:  # the forward above moved BatchNorm's statistics, which losses do not depend on either
        assert losses["ideal"] == losses["checkpoint-k"] == losses["checkpoint"]


def test_both_models_have_blocks() -> None:
    assert len(blocks_of(TINY())) == 2
    assert len(blocks_of(resnet152("cpu", tiny=True))) == 7


@pytest.mark.parametrize(
    ("budget", "expected"), [(100, 1), (95, 1), (90, 1), (89, 2), (45, 6), (10, 9), (5, 10), (0, 10)]
)
def test_the_fewest_blocks_that_fit_are_found_or_all(budget: int, expected: int) -> None:
    asked: list[int] = []

    def peak(blocks: int) -> int:
        asked.append(blocks)
        return 100 - 10 * blocks if blocks < 10 else 3

    assert fewest(peak, 10, budget) == expected
    assert len(asked) <= 5


def test_a_tiers_session_learns_settles_and_moves_and_trains_as_the_ideal_does(tmp_path: Path) -> None:
    ideal = bench().measure(parse("ideal"))
    budget = int(0.9 * ideal["reserved"])
    (tmp_path / f"tiers-move-{budget}").mkdir()  # an earlier run's, which is left alone
    ours = bench(runs=tmp_path).measure(parse("tiers:move"), budget)
    assert (tmp_path / f"tiers-move-{budget}-2" / "plan.json").exists()
    assert ideal["reserved"] > 0 and len(ideal["steps"]) == 3
    assert ours["settled"] and ours["learning"] >= 8
    assert ours["moved"]["d2h"] > 0
    assert ours["losses"][: len(ideal["losses"])] == ideal["losses"]
    assert ours["predicted_step"] > 0 and ours["predicted_peak"] > 0


def test_steps_in_which_plans_change_are_not_timed_but_where_they_never_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first steps under another plan take seconds, and say nothing of it."""
    session: Any = SimpleNamespace(stats=lambda: {"after": count})
    count = 0

    def timed() -> float:
        nonlocal count
        count += 1
        return float(count)

    def changing(every: int, until: int) -> None:
        def plans(session: Any) -> Any:
            return SimpleNamespace(now=(min(count, until) // every,), coming=False, stay=True)

        monkeypatch.setattr(measure, "plans", plans)

    changing(5, until=5)
    timed(), timed(), timed()
    assert bench()._time(timed, 3, session) == ([10.0, 11.0, 12.0], {"after": 9})
    count = 0
    changing(1, until=1000)
    steps, before = bench()._time(timed, 3, session)
    assert len(steps) == 3 and before == {"after": AGAIN * (1 + STEADY)}


def test_the_fewest_blocks_are_told_with_the_measurement() -> None:
    assert bench().measure(parse("checkpoint-k"), 1)["blocks"] == 1  # nobody counts host memory: one block is enough


def test_trl_s_file_is_loaded_without_what_it_imports_and_nothing_stays_behind(tmp_path: Path) -> None:
    file = tmp_path / "offloading.py"
    file.write_text(
        "import psutil\n"
        "from accelerate.logging import get_logger\n"
        "from accelerate.utils.versions import is_torch_version\n"
        "from transformers import is_torch_npu_available\n"
        "logger = get_logger(__name__)\n"
        "answers = is_torch_version('>=', '2.5.0'), is_torch_npu_available(), psutil.virtual_memory().percent\n"
    )
    before = {name for name in ("accelerate", "transformers") if name in sys.modules}
    module = load_trl(file)
    assert module.answers[:2] == (True, False)
    assert {name for name in ("accelerate", "transformers") if name in sys.modules} == before


def test_trl_is_around_forward_and_backward_and_not_around_the_optimizer(tmp_path: Path) -> None:
    file = tmp_path / "offloading.py"
    file.write_text(
        "class Context:\n"
        "    def __init__(self, model):\n"
        "        self.model, model.noted = model, []\n"
        "    def __enter__(self):\n"
        "        self.model.noted.append(self.model.head.weight.grad is not None)\n"
        "    def __exit__(self, *error):\n"
        "        self.__enter__()\n"
        "get_act_offloading_ctx_manager = Context\n"
    )
    workload, plain = TINY(), TINY()
    with ExitStack() as stack:
        step = prepare(parse("trl"), workload, stack, blocks=None, trl=file)
        assert [step().item() for _ in range(2)] == [plain.step().item() for _ in range(2)]
    assert workload.model.noted == [False, True] * 2


# ------------------------------------------------------------------------------------------------ the process


class Scripted:
    """Measures what it was told to, or raises it."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def measure(self, method: object, hbm: int | None) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def serving(*script: Any, left: int = 0) -> list[dict[str, Any]]:
    requests = io.StringIO('{"method": "ideal", "hbm": null}\n' * len(script))
    answers = io.StringIO()
    serve(Scripted(*script), requests, answers, lambda: left)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


def test_a_failure_is_an_answer_and_the_next_request_is_served() -> None:
    first, second = serving(TiersError("hbm is too small:\nraise it"), {"steps": [1.0]})
    assert first["failed"] == "TiersError: hbm is too small:"
    assert not first["again"]
    assert second["steps"] == [1.0]


def test_after_running_out_of_memory_a_process_that_kept_some_gives_up() -> None:
    assert [answer["again"] for answer in serving(torch.OutOfMemoryError("no"), {})] == [False, False]
    assert [answer["again"] for answer in serving(torch.OutOfMemoryError("no"), {}, left=1 << 30)] == [True]


def test_after_any_other_error_the_process_gives_up() -> None:
    assert [answer["again"] for answer in serving(RuntimeError("CUDA error"), {})] == [True]


def test_a_worker_measures_and_one_that_dies_or_hangs_is_an_error_with_its_reason(warmly: None) -> None:
    lengths = (("warmup", 1), ("timed", 3))
    worker = Worker("reference_gpt", Setting(tiny=True, dram="64MiB", lengths=lengths))
    try:
        assert len(worker.ask("ideal", None, 100)["steps"]) == 3
        with pytest.raises(Failed, match="ValueError: there is no method"):
            worker.ask("magic", None, 100)
        assert not worker.usable
    finally:
        worker.close()
    dying = Worker("no_such_workload", Setting(tiny=True))
    with pytest.raises(Failed, match="code 1: AttributeError"):
        dying.ask("ideal", None, 100)
    dying.close()
    hanging = Worker("reference_gpt", Setting(tiny=True))
    with pytest.raises(TooLong, match="took more than 0 s"):
        hanging.ask("ideal", None, 0.2)
    hanging.close()


def test_the_commands_go_through(warmly: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "fractions.json")
    common = ["--results", path, "--tiny", "--dram", "64MiB", "--steps", "3", "--learning", "8,20"]
    main(["run", *common, "--workloads", "reference_gpt", "--budgets", "90", "--methods", "tiers:auto,checkpoint,trl"])
    main(["merge", path, path])
    main(["largest", *common, "--methods", "ideal", "--multiple", "1", "--most", "2"])
    main(["show", path, "--markdown"])
    said = capsys.readouterr().out
    assert "all is measured" in said
    assert "| tiers:auto |" in said
    assert "| reference_gpt | ideal | " in said


def test_mistakes_on_the_command_line_are_told_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="fractions: there is no method magic"):
        main(["run", "--results", str(tmp_path / "a.json"), "--methods", "magic"])
    with pytest.raises(SystemExit, match="is no file"):
        main(["run", "--results", str(tmp_path / "a.json"), "--trl", str(tmp_path / "none.py")])
