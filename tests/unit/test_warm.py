"""What is forked off a warm process starts and ends like `python -c`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit import warm

ENV = {
    "PATH": "/usr/bin:/bin",
    "PYTHONPATH": str(warm.ROOT),
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "TIERS_LEDGER": "/nonexistent",
}
LOOKS = """
import multiprocessing, os, signal, sys, threading, torch
print(__name__, sorted(name for name in globals() if name.startswith("_")), len(globals()))
print(sys.argv, sys.path[:2], os.getcwd(), sorted(os.environ), repr(sys.stdin.read()))
print(threading.active_count(), threading.current_thread() is threading.main_thread())
print(multiprocessing.current_process(), multiprocessing.parent_process(), multiprocessing.get_start_method())
print([name for name in sys.modules if name.partition(".")[0] in ("tests", "torch_tiers", "pytest")])
print(sorted(int(number) for number in os.listdir("/proc/self/fd"))[:3], sys.stdout.line_buffering)
print([signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE)])
"""
ENDS = """
import atexit, threading, time
def late():
    time.sleep(0.2)
    print("thread")
atexit.register(print, "atexit")
threading.Thread(target=late).start()
print("main")
"""


@pytest.mark.parametrize("code", [LOOKS, ENDS, "import sys; sys.exit(7)", "import sys; sys.exit('bad')"])
def test_it_is_as_a_cold_one(code: str, tmp_path: Path) -> None:
    ways = [start(code, "a", "b", env=ENV, cwd=tmp_path) for start in (warm.run, warm.cold)]
    forked, alone = ((done.returncode, done.stdout, done.stderr) for done in ways)
    assert forked == alone


def test_it_ends_by_a_signal_or_an_exception() -> None:
    assert warm.run("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", env=ENV).returncode == -signal.SIGTERM
    done = warm.run("raise ArithmeticError('nan')", env=ENV)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "ArithmeticError: nan")


def test_who_takes_too_long_is_killed() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        warm.run("import time; time.sleep(60)", env=ENV, timeout=0.5)


def test_the_next_one_knows_nothing_of_the_last() -> None:
    warm.run("import torch, torch_tiers; torch.manual_seed(1); torch.left = 1", env=ENV)
    looks = "import sys, torch; print(hasattr(torch, 'left'), 'torch_tiers' in sys.modules, torch.initial_seed() == 1)"
    assert warm.run(looks, env=ENV).stdout == "False False False\n"


WORDS = """
import os, sys, torch
print(__name__, [name for name in sorted(vars()) if not name.startswith("_")], sys.argv, sys.path[:2], os.getcwd())
print(__file__ if "__file__" in vars() else None, sorted(os.environ), os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"])
print("torch_tiers.autoload" in sys.modules, sys.stdin.read(), flush=True)
print("said", file=sys.stderr)
sys.exit(3)
"""


@pytest.mark.parametrize("what", [["-c", WORDS], ["-m", "looks"], ["looks.py"]], ids=lambda what: what[0])
@pytest.mark.parametrize("autoload", ["0", "1"])
def test_what_others_start_is_as_a_cold_one(what: list[str], autoload: str, tmp_path: Path) -> None:
    (tmp_path / "looks.py").write_text(WORDS)
    env = {**os.environ, "PYTHONPATH": str(warm.ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}

    def start() -> tuple[int, str, str]:
        command = [sys.executable, *what, "a", "b c"]
        done = subprocess.run(
            command, cwd=tmp_path, env=env, input="given", capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout, done.stderr

    cold = start()
    with warm.interpreter():
        assert start() == cold
    assert cold[0] == 3


def test_what_others_start_and_kill_is_gone_with_what_it_held() -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with warm.interpreter():
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert pid != process.pid
        process.kill()
        assert process.stdout.read() == ""  # until nobody holds it any longer
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.kill(pid, 0)
            time.sleep(0.1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_others_start_may_end_by_a_signal(number: signal.Signals) -> None:
    with warm.interpreter():
        code = f"import os; os.kill(os.getpid(), {int(number)})"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -number


def test_what_others_start_cannot_have_another_start() -> None:
    with warm.interpreter():
        command = [sys.executable, "-c", "print(1)"]
        env = {**os.environ, "OMP_NUM_THREADS": "7"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "cannot have its own OMP_NUM_THREADS" in done.stderr
