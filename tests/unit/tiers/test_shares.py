"""What a process may take is bounded by what the machine leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torch_tiers import shares
from torch_tiers.assembly import Session
from torch_tiers.config import load
from torch_tiers.migrator.telemetry.counters import Counters
from torch_tiers.topology import Filesystem


@pytest.mark.parametrize(("kind", "bounded"), [("tmpfs", True), ("ext4", False)])
def test_a_spill_directory_in_memory_is_bounded_by_what_is_left_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, bounded: bool
) -> None:
    monkeypatch.setattr(shares, "filesystem_of", lambda path: Filesystem(kind, "somewhere", None))
    wanted = {"dram": "64MiB", "nvme": "64MiB", "nvme_path": str(tmp_path), "ledger": str(tmp_path / "ledger")}
    session = Session(load(wanted, environ={}, cwd=tmp_path).config)
    backing = session._make_backing(Counters(), on_gpu=False)
    assert session._nvme is not None
    assert [volume._room.watches for volume in session._nvme._volumes] == [bounded]
    session._nvme.close()
    if session._dram is not None:
        session._dram.close()
    del backing


def test_a_share_of_what_is_needed_is_no_more_than_there_is(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    ours = shares.Shares(load({"hbm": "60%"}, environ={}, cwd=tmp_path).config)
    with caplog.at_level("INFO", "tiers"):
        assert ours.settle(cpu, 1000, 500) == ours.hbm(cpu) == 500
        assert "so the budget is 500 B from now on (60% of that, which is more than there is)" in caplog.text
        assert ours.settle(cpu, 500, 500) == ours.hbm(cpu) == 300
    assert caplog.text.endswith("(60% of that)\n")
