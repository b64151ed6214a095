"""`tiers.session`: what it takes, which allocator it has, and what it says of itself."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from unittest import mock

import pytest
import torch

import torch_tiers as tiers
from tests.scenarios import perceptron, train
from torch_tiers import paging, refusals
from torch_tiers import session as made_of
from torch_tiers.allocator.native.pytorch import adapter
from torch_tiers.assembly import Session
from torch_tiers.config import ConfigError, load
from torch_tiers.config_keys import BY_ARGUMENT
from torch_tiers.migrator.telemetry.counters import Counters
from torch_tiers.spoken import say_if_untested


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory without a tiers.toml, and nothing told yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(refusals.TOLD, raising=False)


def test_its_arguments_are_the_keys_and_a_file() -> None:
    taken = inspect.signature(tiers.session).parameters
    assert set(taken) == {*BY_ARGUMENT, "config"}
    assert all(each.kind is each.KEYWORD_ONLY and each.default is None for each in taken.values())


def test_each_argument_is_documented() -> None:
    described = (inspect.getdoc(made_of) or "").split("Parameters")[1].split("Raises")[0].splitlines()
    named = {name.strip() for line in described if " : " in line for name in line.split(" : ")[0].split(",")}
    assert named == {*BY_ARGUMENT, "config"}


def test_a_file_that_it_names_is_read(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[hbm]\ncapacity = '1GiB'")
    assert tiers.session(config=tmp_path / "mine.toml")._config.hbm.capacity == 1 << 30


def test_the_allocator_is_ours_unless_another_is_configured(tmp_path: Path) -> None:
    assert tiers.session()._config.allocator == "pages"
    (tmp_path / "tiers.toml").write_text('allocator = "torch"')
    assert tiers.session()._config.allocator == "torch"


def test_opened_after_the_program_used_cuda_it_has_pytorch_s_allocator_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(cache: Path) -> Path:
        pytest.fail("it takes half a minute, for nothing")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(adapter, "build", refuse)
    monkeypatch.setattr(paging, "prefer_expandable_segments", lambda: None)
    with caplog.at_level(logging.WARNING, logger="tiers"), tiers.session(hbm="1GiB") as session:
        assert session.stats()["allocator"] == "torch"
        assert "allocator torch" in repr(session)
        assert session.runtime.options.enforce  # the budget holds all the same
    told = (
        "PyTorch takes no allocator once the program has used CUDA: open the session earlier, or start the program by "
        "tiers run; PyTorch's own allocator is used, with the migrator"
    )
    assert [record.message for record in caplog.records] == [told]


def test_a_larger_budget_than_that_of_our_allocator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator lasts as long as the process. A later session may have less of it, as in a notebook."""
    monkeypatch.setattr(paging, "_hbm", 2 << 30)
    with pytest.raises(ConfigError, match=r"hbm.capacity is 3.0 GiB, .* was given 2.0 GiB: .* start another process"):
        Session(load({"allocator": "pages", "hbm": "3GiB"}).config)
    for given, asked in ((2 << 30, 2 << 30), (2 << 30, 1 << 30), (2 << 30, None), (0, 3 << 30)):  # 0: all there is
        monkeypatch.setattr(paging, "_hbm", given)
        paging.check_budget(asked)


def test_it_says_what_it_is_and_how_far_it_is() -> None:
    made = tiers.session(allocator="torch", policy="keep", hbm="1GiB", dram="64MiB")
    asked = "allocator torch, policy keep, hbm 1.0 GiB, dram 64.0 MiB"
    assert repr(made) == f"<session: {asked}, not opened>"
    with made as opened:
        assert repr(opened) == repr(made) == f"<Session: {asked}, waits for a training step>"
        torch.nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward()
        assert repr(opened) == f"<Session: {asked}, at work>"
    assert repr(opened) == f"<Session: {asked}, closed>"


@pytest.mark.parametrize(("version", "times"), [("2.13.1+cu130", 0), ("2.14.0", 1), ("3.0", 1), ("2.9", 0)])
def test_a_torch_that_was_not_tested_is_told_once(
    version: str, times: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    for _ in range(2):
        say_if_untested()
    assert [record.message for record in caplog.records] == times * [
        f"torch {version} is newer than 2.13, the newest that torch-tiers was tested with"
    ]


def test_at_its_end_it_says_what_the_program_needed_and_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tmp_path / "run"
    with (
        caplog.at_level(logging.INFO, logger="tiers"),
        tiers.session(hbm="8MiB", run=run, log="info", plan_cache=False),
    ):
        train(perceptron(torch.device("cpu")), torch.device("cpu"), steps=4)
    said = [record.getMessage() for record in caplog.records]
    assert any(text.startswith("at work: allocator ") for text in said)
    needs = next(number for number, text in enumerate(said) if text.startswith("with everything kept "))
    assert said[needs + 1].startswith("an iteration ")  # after it there may be hints
    assert said[-1] == f"details: tiers report {run}; other budgets: tiers suggest {run}"


def test_a_session_in_which_nothing_trained_ends_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tiers")
    with tiers.session(allocator="torch", log="info"):
        pass
    assert not caplog.records


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(tiers.__file__).parent / "py.typed").exists()


def test_an_end_that_is_interrupted_closes_the_tiers_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while a drive was waited for left the store's threads and its files to the interpreter's end."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    config = tiers.session(allocator="torch", nvme="16MiB", nvme_path=tmp_path, nvme_gds="off", dram="16MiB")._config
    session = Session(config)
    session._make_backing(Counters(), False)
    assert session._nvme is not None
    pool = session._nvme._drives
    monkeypatch.setattr(session.runtime, "close", interrupt)
    with pytest.raises(KeyboardInterrupt):
        session.close()
    assert not any(thread.is_alive() for thread in pool._threads)


@pytest.mark.parametrize("at_exit", [False, True])
def test_optimizer_state_on_nvme_is_brought_back_unless_the_process_ends_as_well(at_exit: bool) -> None:
    """To read it takes minutes, and nobody would use it."""
    opened = Session(load({"allocator": "torch"}).config)
    opened.open()
    with mock.patch.object(opened.runtime.nvme, "bring_back") as bring_back:
        opened.close(at_exit=at_exit)
    assert bring_back.called is not at_exit


def test_what_lies_beside_the_allocator_is_part_of_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(tiers.session(allocator="torch")._config)
    numbers = session.runtime.numbers() | {"peak_hbm": 70, "beside_hbm": 20}
    monkeypatch.setattr(session.runtime, "numbers", numbers.copy)
    assert session.stats()["peak"]["hbm"] == 90
    session.close()
