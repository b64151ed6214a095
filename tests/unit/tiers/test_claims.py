"""Who holds host memory of the node, as ledgers say; they are read, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torch_tiers.allocator.holders import Holder
from torch_tiers.allocator.host.ledger import Account, Ledger
from torch_tiers.allocator.sizes import GiB, MiB
from torch_tiers.monitor.claims import holders_of_host_memory


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("sys.argv", ["a-train.py"])
    return tmp_path / "ledger"


def claimed(place: Path, nbytes: int, tier: str = "dram") -> Account:
    account = Ledger(place).open_account(tier, GiB)
    assert account.claim(nbytes) == nbytes
    return account


def test_claims_of_a_process_are_added_up_and_those_of_other_tiers_are_not(place: Path) -> None:
    accounts = [claimed(place, 2 * MiB), claimed(place, 4 * MiB), claimed(place, 8 * MiB, "nvme")]
    assert holders_of_host_memory([place]) == [Holder(6 * MiB, os.getpid(), "a-train.py")]
    for account in accounts:
        account.release(8 * MiB)
    assert holders_of_host_memory([place]) == []


def test_what_the_dead_have_left_is_neither_told_nor_removed(place: Path) -> None:
    account = claimed(place, 2 * MiB)
    dead = place / "dram-7-gone-0123"
    dead.write_bytes(b"x" * 100)
    assert [holder.pid for holder in holders_of_host_memory([place])] == [os.getpid()]
    assert dead.exists()
    account.release(2 * MiB)


def test_a_claim_can_be_made_while_others_look(place: Path) -> None:
    account = claimed(place, 2 * MiB)
    holders_of_host_memory([place])
    assert account.claim(2 * MiB) == 2 * MiB
    assert holders_of_host_memory([place]) == [Holder(4 * MiB, os.getpid(), "a-train.py")]
    account.release(4 * MiB)


def test_where_there_is_no_ledger_of_this_user_s_nobody_holds_anything(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o755)
    (open_to_all / "dram-7-gone-0123").write_bytes(b"x")
    assert holders_of_host_memory([tmp_path / "nowhere", open_to_all]) == []
    assert not (tmp_path / "nowhere").exists()
