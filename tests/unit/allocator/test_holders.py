"""What a process met as it claimed a tier: who else held how much when it was short, or at its most."""

from __future__ import annotations

import os
from pathlib import Path

from tests.unit.allocator.host.test_ledger import CAPACITY
from torch_tiers.allocator.holders import Claims, Held, Holder
from torch_tiers.allocator.host.ledger import Ledger
from torch_tiers.allocator.sizes import PAGE
from torch_tiers.planning.neighbours import render

OTHER = Holder(4 * PAGE, 1, "other.py")


def test_a_claim_that_is_granted_is_no_shortage_and_the_fullest_is_kept() -> None:
    claims = Claims()
    claims.claimed(PAGE, PAGE, 0, ())
    claims.claimed(PAGE, PAGE, 2 * PAGE, (OTHER,))
    claims.claimed(PAGE, PAGE, 0, ())
    assert (claims.shortages, claims.shortest) == (0, None)
    assert claims.fullest == Held(PAGE, 2 * PAGE, (OTHER,))


def test_of_shortages_the_one_is_kept_at_which_others_held_most() -> None:
    claims = Claims()
    for nbytes in (1, 3, 2):
        claims.claimed(0, PAGE, 0, (Holder(nbytes * PAGE, 1, "other.py"),))
    assert claims.shortages == 3
    assert claims.shortest is not None and claims.shortest.by_others == 3 * PAGE


def test_a_process_s_other_accounts_are_its_own() -> None:
    claims = Claims()
    claims.claimed(0, PAGE, PAGE, (OTHER, Holder(2 * PAGE, os.getpid(), "me")))
    assert claims.shortest == Held(PAGE, 3 * PAGE, (OTHER,))


def test_a_shortage_is_told_again_once_others_hold_something_else() -> None:
    claims, told = Claims(), list[dict[str, object]]()
    claims.told = lambda **facts: told.append(facts)
    for others in ((OTHER,), (OTHER,), (), (OTHER,)):
        claims.claimed(0, PAGE, 0, others)
    assert [facts["others"] for facts in told] == ["8.0 MiB by pid 1 (other.py)", "", "8.0 MiB by pid 1 (other.py)"]
    assert (told[0]["bytes"], told[0]["held"]) == (PAGE, 0)


def test_an_account_notes_what_it_met(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    account = ledger.open_account("dram", CAPACITY)
    assert account.claim(CAPACITY) and not account.claim(PAGE, say=False)
    assert account.claims.shortest == Held(PAGE, CAPACITY, ())
    assert account.claims.fullest == Held(CAPACITY, 0, ())


def test_a_report_tells_who_held_what_when_memory_was_short() -> None:
    claims = Claims()
    claims.claimed(0, PAGE, PAGE, (OTHER, Holder(PAGE, 2, "third.py")))
    claims.no_room = "limit of the cgroup"
    short, room = render({"host_memory": claims.to_json()})
    assert short == (
        "host memory was short 1 times: this program held 2.0 MiB and asked for 2.0 MiB more, while other programs "
        "with tiers held 10.0 MiB: 8.0 MiB by pid 1 (other.py), 2.0 MiB by pid 2 (third.py)"
    )
    assert room.endswith("limit of the cgroup")


def test_a_report_tells_who_held_what_at_the_most_where_it_was_not_short() -> None:
    claims = Claims()
    claims.claimed(PAGE, PAGE, PAGE, (OTHER,))
    (line,) = render({"host_memory": claims.to_json()})
    assert line == (
        "when this program held most host memory, 4.0 MiB, other programs with tiers held 8.0 MiB by pid 1 (other.py)"
    )


def test_a_report_of_an_earlier_version_or_of_who_claimed_nothing_tells_nothing() -> None:
    assert [*render({})] == [*render({"host_memory": Claims().to_json()})] == []


def test_of_many_holders_the_largest_are_kept_and_the_rest_added_up() -> None:
    claims = Claims()
    claims.claimed(0, PAGE, 0, tuple(Holder(number * PAGE, number, "p") for number in range(1, 11)))
    assert len(claims.to_json()["shortest"]["others"]) == 4
    (line,) = render({"host_memory": claims.to_json()})
    assert line.endswith("14.0 MiB by pid 7 (p), 42.0 MiB by more of them")
