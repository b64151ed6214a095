"""SIGTERM, by which schedulers end programs: the run directory is written, and all else is as it were without us."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from tests.unit.tiers.test_activation import PROGRAM, START, stats_of, tiered
from torch_tiers.sigterm import BeforeSigterm

END = "import signal\nos.kill(os.getpid(), signal.SIGTERM)\nprint('still there')\n"
FILES = ["losses.csv", "plan.json", "stats.json", "timeline.json.gz", "trace.json"]


def test_a_program_that_is_terminated_leaves_its_run_and_ends_by_the_signal(tmp_path: Path) -> None:
    done = tiered(START + "for i in range(6): step(i)\n" + END, TIERS_RUN=tmp_path)
    assert (done.returncode, done.stderr, "still" in done.stdout) == (-signal.SIGTERM, "", False)
    assert stats_of(tmp_path)["steps"] == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES


def test_a_session_in_code_gives_the_signal_back_at_its_end(tmp_path: Path) -> None:
    within = f"""
import signal
import torch_tiers as tiers
with tiers.session(allocator="torch", run={str(tmp_path)!r}, dram="64MiB"):
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    step(0); step(1)
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
"""
    done = tiered(PROGRAM + within, TIERS_ALLOCATOR="off")
    assert done.returncode == 0, done.stderr
    assert stats_of(tmp_path)["steps"] == 2


def test_a_signal_that_does_not_end_the_program_is_followed_by_the_rest_of_the_run(tmp_path: Path) -> None:
    """The first process of a container is not ended by a signal that it raises itself."""
    survives = "import signal\nsignal.raise_signal = lambda number: None\n"
    done = tiered(START + survives + "step(0)\nos.kill(os.getpid(), signal.SIGTERM)\nstep(1)\n", TIERS_RUN=tmp_path)
    assert done.returncode == 0, done.stderr
    assert stats_of(tmp_path)["steps"] == 2
    assert not list(tmp_path.glob("process*"))


def test_a_session_that_another_thread_has_closed_does_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "raise_signal", lambda number: None)
    acted: list[str] = []
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ours = BeforeSigterm(lambda: acted.append("written"))
    try:
        ours.set()
        thread = threading.Thread(target=ours.clear)
        thread.start()
        thread.join()
        handler = signal.getsignal(signal.SIGTERM)  # called here: a signal might come when all is as it was before
        assert callable(handler)
        handler(signal.SIGTERM, None)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not acted


def test_a_signal_in_the_middle_of_what_the_handler_asks_for_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    inside = (
        "from torch_tiers.migrator.runtime import entry\nsignal.alarm(30)\nwith entry._active._savers._listing:\n    "
    )
    done = tiered(START + "import signal\nstep(0)\n" + inside + END.split("\n")[1], TIERS_RUN=tmp_path)
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, "")
    assert stats_of(tmp_path)["steps"] == 1


@pytest.mark.parametrize("before", ["step(0)", "pass"])
def test_a_handler_of_the_program_s_own_is_the_one_that_is_asked(tmp_path: Path, before: str) -> None:
    """Installed before it trains, or after."""
    own = f"import signal\n{before}\nsignal.signal(signal.SIGTERM, lambda *_: print('mine'))\nstep(1)\n"
    done = tiered(START + own + END, TIERS_RUN=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["mine", "still there"]
    assert (tmp_path / "stats.json").exists()


def test_a_fork_that_is_terminated_writes_nothing_and_ends_at_once(tmp_path: Path) -> None:
    """As if there were no handler: one in Python would wait until its process is back from whatever it does."""
    fork = """
import signal, time
step(0)
ready, tell = os.pipe()
if (child := os.fork()) == 0:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    os.write(tell, b".")
    time.sleep(60)
    os._exit(1)  # whatever comes: below, `child` is 0, which is the whole group of processes
os.close(tell)
assert os.read(ready, 1)  # a signal that comes while Python is at the fork is lost
os.kill(child, signal.SIGTERM)
assert os.waitpid(child, 0)[1] == signal.SIGTERM
assert not os.path.exists(os.environ["TIERS_RUN"])
step(1)
"""
    done = tiered(START + fork, TIERS_RUN=tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert stats_of(tmp_path / "run")["steps"] == 2


def test_who_does_not_train_or_asks_for_no_run_directory_keeps_the_signal_as_it_was(tmp_path: Path) -> None:
    asked = "import signal\nassert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL\n"
    for program, environ in ((START + asked, {"TIERS_RUN": tmp_path}), (START + "step(0)\n" + asked, {})):
        done = tiered(program, **environ)
        assert done.returncode == 0, done.stderr


def test_training_in_another_thread_than_the_main_one_leaves_the_signal_alone(tmp_path: Path) -> None:
    train = "import signal, threading\nt = threading.Thread(target=step, args=(0,)); t.start(); t.join()\n"
    done = tiered(START + train + END, TIERS_RUN=tmp_path / "run")
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, "")
    assert not (tmp_path / "run").exists()


def test_a_run_directory_that_cannot_be_written_does_not_keep_the_process_alive(tmp_path: Path) -> None:
    done = tiered(START + "step(0)\nopen(os.environ['TIERS_RUN'], 'w')\n" + END, TIERS_RUN=tmp_path / "run")
    assert done.returncode == -signal.SIGTERM
    lost = "the numbers of this run are lost: name a writable directory"
    assert done.stderr == f"tiers: TIERS_RUN: {tmp_path}/run cannot be written: File exists; {lost}\n"
