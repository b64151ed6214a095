"""Jobs that are done beside the program: in a process of their own where they can be sent there."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from tests.unit.by_hand import eventually
from tests.unit.modelled import gpt
from torch_tiers import migrator
from torch_tiers.migrator.controller import background
from torch_tiers.migrator.controller.background import at_once, give_up, in_background, planners
from torch_tiers.migrator.controller.planned import PlanRequest, plan_all
from torch_tiers.migrator.model.links import PCIE_GEN5
from torch_tiers.migrator.model.plan import NoPlanFits
from torch_tiers.migrator.policies import POLICIES


def test_that_process_has_the_package_from_where_this_one_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not from another installation, nor with our modules in the place of the standard library's."""
    paths = []

    def answer(sent: bytes, environ: dict[str, str], _: object) -> bytes:
        paths.append(environ["PYTHONPATH"].split(os.pathsep)[0])
        return b""

    monkeypatch.setattr(background, "_answer_to", answer)
    in_background(os.getpid).result(timeout=60)
    assert paths == [str(Path(migrator.__file__).parents[2])]


def test_a_job_is_done_in_another_process_that_knows_nothing_of_the_directory_it_is_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "migrator.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    assert in_background(os.getpid).result(timeout=60) != os.getpid()


def test_a_plan_is_the_same_wherever_it_is_made() -> None:
    trace = gpt(blocks=2)
    budget = 2 * (max(trace.others) + trace.saved_bytes)
    job = partial(plan_all, POLICIES["auto"], PlanRequest((trace,), (budget,), 0, PCIE_GEN5))
    (there,), (here,) = in_background(job).result(timeout=60), at_once(job).result()
    assert there.plan == here.plan


def test_what_a_job_raises_comes_back() -> None:
    trace = gpt(blocks=2)
    job = partial(plan_all, POLICIES["auto"], PlanRequest((trace,), (1,), 0, PCIE_GEN5))
    with pytest.raises(NoPlanFits) as error:
        in_background(job).result(timeout=60)
    assert error.value.smallest > 1


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), None])
def test_where_no_process_can_be_had_the_job_is_done_here(
    monkeypatch: pytest.MonkeyPatch, error: OSError | None
) -> None:
    def answer(*_: object) -> bytes:
        if error is not None:
            raise error
        return b"what a sitecustomize prints"

    monkeypatch.setattr(background, "_answer_to", answer)
    assert in_background(os.getpid).result(timeout=60) == os.getpid()


def test_who_plans_is_known_while_it_does() -> None:
    """What it takes is not what the program's workers take."""
    assert not planners()
    plan = in_background(partial(time.sleep, 2.0))
    assert eventually(lambda: len(planners()) == 1)
    plan.result(timeout=60)
    assert not planners()


def test_a_process_that_dies_leaves_its_job_to_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_SERVE", "import os; os._exit(3)")
    assert in_background(os.getpid).result(timeout=60) == os.getpid()
    assert not planners()


def test_a_process_that_is_stuck_is_ended_and_its_job_is_not_begun_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be stuck here as well, and hold training up."""
    monkeypatch.setattr(background, "DEADLINE", 0.5)
    error = in_background(partial(time.sleep, 600.0)).exception(timeout=60)
    assert isinstance(error, TimeoutError) and "took more than 0.5 s" in str(error)
    assert not planners()


PROGRAM = """
import sys, time
from functools import partial
from torch_tiers.migrator.controller.background import in_background, planners
in_background(partial(time.sleep, 300.0))
while not planners():
    time.sleep(0.01)
time.sleep(float(sys.argv[1]))
print(*planners(), flush=True)
time.sleep(300.0)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel ends it, on Linux")
@pytest.mark.parametrize("after", [0.0, 3.0])
def test_a_process_does_not_outlive_a_program_that_is_killed(after: float) -> None:
    """Whether it is at its job by then, or is only being started."""
    environ = {**os.environ, "PYTHONPATH": str(Path(migrator.__file__).parents[2])}
    command = [sys.executable, "-c", PROGRAM, str(after)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as program:
        assert program.stdout is not None
        planner = int(program.stdout.readline())
        program.kill()
    assert eventually(lambda: not is_running(planner))


def is_running(pid: int) -> bool:
    """Whether there is such a process that has not ended: who should ask how it did may not have yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_cannot_be_sent_is_done_in_a_thread() -> None:
    thread = in_background(lambda: threading.current_thread().name).result(timeout=60)
    assert thread == "tiers-planner"


def test_what_nobody_waits_for_any_more_is_not_computed_any_more(caplog: pytest.LogCaptureFixture) -> None:
    """A program of ever new kinds of iterations had twenty planners at a time, whose plans nobody took."""
    plan = in_background(partial(time.sleep, 60.0))
    begin = time.monotonic()
    while not planners():
        assert time.monotonic() - begin < 30
        time.sleep(0.01)
    give_up(plan)
    assert plan.exception(timeout=30) is not None  # and is not done in this process instead
    assert not planners()
    assert "in this process" not in caplog.text


def test_what_is_given_up_before_its_process_begins_ends_with_that() -> None:
    plan = in_background(partial(time.sleep, 60.0))
    give_up(plan)
    assert plan.exception(timeout=30) is not None
    give_up(at_once(os.getpid))  # which is there already
    give_up(None)


def test_at_once_is_now() -> None:
    assert at_once(os.getpid).result(timeout=0) == os.getpid()
