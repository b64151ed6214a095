"""From the facts to the files of a store: what is measured, what is said, and what cuFile is told."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.ways_fakes import EVEN, FAST, MACHINE, PLACE, SLOW, UUID, Timer
from torch_tiers.allocator.errors import StoreError, TiersError
from torch_tiers.allocator.nvme import choose, decide
from torch_tiers.allocator.nvme.choose import Opener, choose_backends
from torch_tiers.allocator.nvme.facts import Machine, Place
from torch_tiers.allocator.nvme.posix import PosixFile
from torch_tiers.allocator.nvme.store import NvmeStore
from torch_tiers.allocator.nvme.ways import Gds
from torch_tiers.allocator.sizes import MiB

NO_MODULE = replace(MACHINE, nvidia_fs=False)
NEITHER = replace(NO_MODULE, p2pdma=False)


class Straight(PosixFile):
    """A file that claims to take GPU memory."""

    device_memory = True

    def __init__(self, directory: Path, *, mode: str) -> None:
        assert mode == "gds"
        super().__init__(directory)


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "_said", set())
    monkeypatch.setattr(choose, "KvikioFile", Straight)
    monkeypatch.delenv("CUFILE_USE_PCIP2PDMA", raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch):
    """Choose on such a machine, with such a directory or several, measured as `timer` has it."""

    def choose_on(machine: Machine, places: dict[Path, Place], gds: Gds, timer: Timer) -> Opener:
        monkeypatch.setattr(decide, "read_machine", lambda gpu: machine)
        monkeypatch.setattr(decide, "read_place", lambda path: replace(places[path], path=path))
        return choose_backends(list(places), gds, None, UUID, timer)

    return choose_on


def test_a_store_opens_what_was_chosen(chosen, tmp_path: Path) -> None:
    opener = chosen(MACHINE, {tmp_path: PLACE}, "prefer", Timer({"host": EVEN, "gds": FAST, "p2pdma": EVEN}))
    assert opener.decision.direct and opener.decision.ways == {"gds"}
    file = opener(tmp_path)
    assert file.device_memory
    file.close()
    NvmeStore([tmp_path], 4 * MiB, gds="prefer", step=MiB, backend=opener).close()
    assert "CUFILE_USE_PCIP2PDMA" not in os.environ


def test_nothing_is_measured_where_only_the_host_s_way_is_open(chosen, tmp_path: Path) -> None:
    timer = Timer({})
    opener = chosen(NEITHER, {tmp_path: PLACE}, "prefer", timer)
    assert timer.asked == [] and not opener.decision.direct
    chosen(MACHINE, {tmp_path: PLACE}, "off", timer)
    assert timer.asked == []
    chosen(MACHINE, {tmp_path: PLACE, tmp_path / "b": replace(PLACE, kind="tmpfs")}, "prefer", timer)
    assert timer.asked == []  # one closed directory closes the store


def test_only_open_ways_are_measured_beside_the_host_s(chosen, tmp_path: Path) -> None:
    timer = Timer({"host": EVEN, "p2pdma": FAST})
    chosen(NO_MODULE, {tmp_path: PLACE}, "prefer", timer)
    assert timer.asked == [(tmp_path, ("host", "p2pdma"))]


def test_cufile_is_told_of_pci_p2pdma_where_that_is_taken(chosen, tmp_path: Path) -> None:
    chosen(NO_MODULE, {tmp_path: PLACE}, "prefer", Timer({"host": EVEN, "p2pdma": SLOW}))
    assert "CUFILE_USE_PCIP2PDMA" not in os.environ
    chosen(NO_MODULE, {tmp_path: PLACE}, "prefer", Timer({"host": EVEN, "p2pdma": FAST}))
    assert os.environ["CUFILE_USE_PCIP2PDMA"] == "true"


def test_each_directory_s_way_is_said_once_at_info(chosen, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tiers")
    hung = "the measurement of p2pdma did not end in 60 s"
    for _ in range(2):
        opener = chosen(NO_MODULE, {tmp_path: PLACE}, "prefer", Timer({"host": EVEN, "p2pdma": hung}))
    assert not opener.decision.direct
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (
            "INFO",
            f"nvme at {tmp_path} goes through host memory, host 10.0/10.0/10.0 GB/s write/read/both; "
            f"not direct: {hung}",
        )
    ]


def test_off_is_silent(chosen, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tiers")
    assert not chosen(MACHINE, {tmp_path: PLACE}, "off", Timer({}))(tmp_path).device_memory
    assert caplog.records == []


def test_a_directory_that_differs_is_named(chosen, tmp_path: Path) -> None:
    other = tmp_path / "other"
    places = {tmp_path: PLACE, other: replace(PLACE, kind="overlay")}
    opener = chosen(MACHINE, places, "prefer", Timer({}))
    told = opener.decision.directories[tmp_path].describe()
    assert f"all directories must, and {other} does not: cuFile has no direct way to overlay" in told
    with pytest.raises(TiersError, match=rf"nvme at {other}: .*overlay"):
        chosen(MACHINE, places, "require", Timer({}))


def test_a_file_that_cufile_refuses_after_all_is_opened_the_host_s_way(
    chosen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(directory: Path, *, mode: str) -> PosixFile:
        raise StoreError(str(directory), 0, 0, "open a file for cuFile in", "error 5008")

    monkeypatch.setattr(choose, "KvikioFile", refuse)
    table = Timer({"host": EVEN, "gds": FAST, "p2pdma": FAST})
    assert not chosen(MACHINE, {tmp_path: PLACE}, "prefer", table)(tmp_path).device_memory
    with pytest.raises(StoreError, match="5008"):
        chosen(MACHINE, {tmp_path: PLACE}, "require", table)(tmp_path)
