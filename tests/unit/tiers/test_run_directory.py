"""The run directory: one per process, whoever else ends at the same time."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from torch_tiers import run_directory
from torch_tiers.config import Config, ConfigError
from torch_tiers.migrator.controller.corrections import Corrections
from torch_tiers.migrator.controller.learned import Learned
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.telemetry.timeline import Timeline

PROCESSES = 6
ROUNDS = 20


def end_together(directory: Path, barrier: Barrier) -> None:
    """What ranks without RANK do at the end of a program, over and over."""
    for number in range(ROUNDS):
        timeline = Timeline()
        timeline.happened(str(os.getpid()))
        barrier.wait()
        stats = {"process": os.getpid(), "filler": "x" * 10_000}
        run_directory.write(directory / f"{number}", stats, None, timeline, force=False)


def test_processes_that_end_together_have_a_directory_each(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(PROCESSES)
    processes = [context.Process(target=end_together, args=(tmp_path, barrier)) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * PROCESSES
    for number in range(ROUNDS):
        found = sorted((tmp_path / f"{number}").rglob(run_directory.STATS))
        assert {json.loads(file.read_text())["process"] for file in found} == {process.pid for process in processes}
        assert len(found) == PROCESSES
        assert all((file.parent / run_directory.TIMELINE).exists() for file in found)
        assert not list((tmp_path / f"{number}").rglob("*.part"))


def test_a_file_system_without_links_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*names: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    first = run_directory.write(tmp_path, {"number": 1}, None, Timeline(), force=False)
    second = run_directory.write(tmp_path, {"number": 2}, None, Timeline(), force=False)
    assert (first, second) == (tmp_path, tmp_path / f"process{os.getpid()}")
    assert [json.loads((place / run_directory.STATS).read_text())["number"] for place in (first, second)] == [1, 2]


@pytest.mark.parametrize(("size", "name"), [("", ""), ("1", ""), ("2", "rank1")])
def test_ranks_have_a_directory_each_and_an_empty_variable_counts_as_not_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str, name: str
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", size)
    assert run_directory.find(Config(run=tmp_path)) == tmp_path / name


@pytest.mark.parametrize("variable", ["WORLD_SIZE"])
@pytest.mark.parametrize("value", ["abc", "0", "-1"])
def test_what_is_no_number_of_processes_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=f"{variable}='{value}'"):
        run_directory.find(Config(run=tmp_path))


def test_an_earlier_run_is_in_the_way_of_who_begins_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of a DataLoader's worker, nor of a trainer that a launcher starts again: they ended with code 2."""
    (tmp_path / run_directory.STATS).write_text("{}")
    with pytest.raises(ConfigError, match="holds an earlier run"):
        run_directory.find(Config(run=tmp_path))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert run_directory.find(Config(run=tmp_path)) == tmp_path
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: "the program")
    assert run_directory.find(Config(run=tmp_path)) == tmp_path


@pytest.mark.parametrize("name", run_directory.FILES)
def test_a_file_that_no_run_wrote_is_in_the_way_and_stays(tmp_path: Path, name: str) -> None:
    """A `plan.json` of the user's was gone at the end of the run."""
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match=r"holds .*: name another directory or set TIERS_RUN_FORCE=1"):
        run_directory.find(Config(run=tmp_path))
    assert run_directory.find(Config(run=tmp_path, run_force=True)) == tmp_path
    assert run_directory.write(tmp_path, {}, None, Timeline(), force=False) == tmp_path / f"process{os.getpid()}"
    assert (tmp_path / name).read_text() == "mine"


def test_nothing_is_written_through_a_link_that_was_put_in_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda _: "guessed")
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / f".{run_directory.STATS}.guessed.part").symlink_to(precious)
    assert run_directory.write(tmp_path, {}, None, Timeline(), force=True) == tmp_path / f"process{os.getpid()}"
    assert precious.read_text() == "mine"


def test_with_force_nothing_of_an_earlier_run_stays(tmp_path: Path) -> None:
    """A run that ended before it had a plan was told by the plan of the one before."""
    learned = Learned(Trace((), 0), Plan("keep", 0, {}, ()), Corrections())
    run_directory.write(tmp_path, {}, learned, Timeline(), force=True)
    assert (tmp_path / run_directory.PLAN).exists() and (tmp_path / run_directory.TRACE).exists()
    run_directory.write(tmp_path, {}, None, Timeline(), force=True)
    assert {path.name for path in tmp_path.iterdir()} == {run_directory.STATS, run_directory.TIMELINE}


def test_with_force_an_earlier_run_is_written_over(tmp_path: Path) -> None:
    for number in (1, 2):
        assert run_directory.write(tmp_path, {"number": number}, None, Timeline(), force=True) == tmp_path
    assert json.loads((tmp_path / run_directory.STATS).read_text()) == {"number": 2}


@pytest.mark.parametrize("where", ["made up by the kernel", "a link to nothing", "a file", "a long name"])
def test_one_that_cannot_be_written_is_refused_at_the_start_whoever_the_user(where: str, tmp_path: Path) -> None:
    """Root may do all that rights tell of, and lost the numbers of a run at its end."""
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    run = {
        "made up by the kernel": Path("/proc/run"),
        "a link to nothing": tmp_path / "link",
        "a file": tmp_path / "file" / "run",
        "a long name": tmp_path / ("x" * 300),
    }[where]
    with pytest.raises(ConfigError, match=r"TIERS_RUN: .* cannot be written: .*name (one|a directory) that you may"):
        run_directory.find(Config(run=run))


def test_one_that_can_be_written_is_left_as_it_is_at_the_start(tmp_path: Path) -> None:
    assert run_directory.find(Config(run=tmp_path / "a" / "b")) == tmp_path / "a" / "b"
    assert not list(tmp_path.iterdir())
