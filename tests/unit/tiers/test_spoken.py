"""What a run says of itself to somebody who looks on, and to nobody else."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TRAINS = """
import torch
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(8):
    model(torch.ones(512, 64)).sum().backward()
    optimizer.step()
"""
INFERS = """
import torch
with torch.no_grad():
    torch.nn.Linear(8, 8)(torch.ones(8))
"""
NEITHER = "import torch"
INTERRUPTED = f"{TRAINS}\nimport signal\nsignal.raise_signal(signal.SIGINT)\n"
ENVIRON = {"TIERS_ALLOCATOR": "torch", "TIERS_HBM": "64MiB", "TIERS_PLAN_CACHE": "0"}


def run(program: str, cwd: Path, *, terminal: bool, ends: int = 0, **environ: str) -> list[str]:
    """What a program says on stderr, which is a terminal or is none; it `ends` with this code."""
    ours, theirs = pty.openpty() if terminal else os.pipe()
    with os.fdopen(theirs, "wb") as stderr:
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=cwd,
            env=os.environ | ENVIRON | environ,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            check=False,
        )
    assert done.returncode == ends
    said = b""
    with os.fdopen(ours, "rb", buffering=0) as stream:
        try:
            while part := stream.read(4096):
                said += part
        except OSError:  # a terminal whose other end is closed
            pass
    lines = said.decode().splitlines()
    return [line for line in lines if "building the" not in line and "built the" not in line]


def test_on_a_terminal_a_run_says_a_line_as_it_begins_and_one_as_it_ends(tmp_path: Path) -> None:
    first, last = run(TRAINS, tmp_path, terminal=True)
    assert first == "tiers: at work: allocator torch, policy auto, hbm 64.0 MiB"
    assert last.startswith("tiers: the program needs ")
    assert "its peak was " in last
    assert last.endswith("details: run with TIERS_RUN=DIR, then tiers report DIR and tiers suggest DIR")


def test_with_a_run_directory_the_last_line_names_what_to_type_next(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    last = run(TRAINS, tmp_path, terminal=True, TIERS_RUN=str(directory))[-1]
    assert last.endswith(f"details: tiers report {directory}; other budgets: tiers suggest {directory}")


@pytest.mark.parametrize("program", [TRAINS, INFERS, NEITHER])
def test_without_a_terminal_nothing_is_said_unasked(tmp_path: Path, program: str) -> None:
    assert run(program, tmp_path, terminal=False) == []


@pytest.mark.parametrize("program", [TRAINS, INFERS])
def test_who_wants_errors_alone_and_ranks_but_the_first_are_left_in_peace(tmp_path: Path, program: str) -> None:
    assert run(program, tmp_path, terminal=True, TIERS_LOG="error") == []
    assert run(program, tmp_path, terminal=True, RANK="1", WORLD_SIZE="2") == []


def test_info_tells_the_answer_in_ten_lines_at_most_and_what_to_type_next(tmp_path: Path) -> None:
    said = run(TRAINS, tmp_path, terminal=False, TIERS_LOG="info")
    begins = next(number for number, line in enumerate(said) if "with everything kept" in line)
    assert len(said) - begins <= 10
    assert said[-1].startswith("tiers: details: ")


@pytest.mark.parametrize(("terminal", "log"), [(True, "warning"), (False, "info")])
def test_a_program_that_ctrl_c_ends_dies_of_that_as_it_does_without_tiers(
    tmp_path: Path, terminal: bool, log: str
) -> None:
    """Else a shell's loop goes on with the next program. Python forgets it where anything executes text at exit."""
    said = run(INTERRUPTED, tmp_path, terminal=terminal, ends=-signal.SIGINT, TIERS_LOG=log)
    assert said[-1].startswith("tiers: ") and "details: " in said[-1]


@pytest.mark.parametrize(("terminal", "log"), [(True, "warning"), (False, "info")])
def test_a_program_that_only_infers_is_told_what_happens_to_it(tmp_path: Path, terminal: bool, log: str) -> None:
    (said,) = run(INFERS, tmp_path, terminal=terminal, TIERS_LOG=log)
    assert said.startswith("tiers: no training step was made, so nothing was planned and there is no report")


def test_who_asked_for_a_report_of_a_program_that_only_infers_is_told_that_there_is_none(tmp_path: Path) -> None:
    (said,) = run(INFERS, tmp_path, terminal=False, TIERS_RUN=str(tmp_path / "run"))
    assert "there is no report" in said


def test_workers_that_use_modules_say_nothing(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import torch\n\ndef work():\n    with torch.no_grad():\n        torch.nn.Linear(8, 8)(torch.ones(8))\n"
    )
    starts = "from script import work; from multiprocessing import get_context as get; " + (
        "worker = get('spawn').Process(target=work); worker.start(); worker.join(); assert worker.exitcode == 0"
    )
    assert run(starts, tmp_path, terminal=True, TIERS_RUN=str(tmp_path / "run")) == []


def test_a_program_without_a_model_is_told_nothing(tmp_path: Path) -> None:
    assert run(NEITHER, tmp_path, terminal=True, TIERS_RUN=str(tmp_path / "run")) == []
