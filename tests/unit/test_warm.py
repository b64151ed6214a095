"""What is forked off a warm process starts and ends like `python -c`."""

from __future__ import annotations

import signal
import subprocess
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
