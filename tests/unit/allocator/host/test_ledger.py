"""Two processes stay within the node's capacity together, and what dies gives its share back."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.unit.by_hand import eventually
from tests.unit.store_faults import FaultyFile
from torch_tiers import shares
from torch_tiers.allocator.holders import Holder, describe_holders
from torch_tiers.allocator.host import ledger as accounts
from torch_tiers.allocator.host import mappings
from torch_tiers.allocator.host.dram import DramArena
from torch_tiers.allocator.host.ledger import Account, Ledger
from torch_tiers.allocator.nvme.posix import PosixFile
from torch_tiers.allocator.nvme.store import NvmeStore
from torch_tiers.allocator.sizes import PAGE, MiB
from torch_tiers.assembly import Session
from torch_tiers.config import ConfigError, load

ROOT = Path(__file__).parents[4]
CAPACITY = 16 * PAGE


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger")


@pytest.fixture
def account(ledger: Ledger) -> Account:
    return ledger.open_account("dram", CAPACITY)


@pytest.fixture
def other(ledger: Ledger) -> Account:
    """As another process would have it: accounts of one process do not know each other."""
    return ledger.open_account("dram", CAPACITY)


@pytest.fixture
def start(ledger: Ledger) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a process that runs `code` with an account of its own."""
    started: list[subprocess.Popen[str]] = []

    def start_process(code: str) -> subprocess.Popen[str]:
        prelude = (
            "import os, sys, time\nfrom pathlib import Path\nfrom torch_tiers.allocator.host.ledger import Ledger\n"
            f"account = Ledger(Path({str(ledger.directory)!r})).open_account('dram', {CAPACITY})\n"
            f"PAGE = {PAGE}\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", prelude + code],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start_process
    for process in started:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def files(ledger: Ledger) -> list[str]:
    return os.listdir(ledger.directory)


# ----------------------------------------------------------------------------------------- claims


def test_accounts_share_the_capacity(account: Account, other: Account) -> None:
    assert account.claim(10 * PAGE) == 10 * PAGE
    assert other.claim(7 * PAGE) == 0
    assert other.claim(6 * PAGE) == 6 * PAGE


def test_what_is_released_can_be_claimed_by_others(account: Account, other: Account) -> None:
    account.claim(CAPACITY)
    account.release(2 * PAGE)
    assert other.claim(2 * PAGE)
    assert not other.claim(PAGE)


def test_a_claim_may_take_what_is_left(account: Account, other: Account) -> None:
    account.claim(10 * PAGE)
    assert other.claim(8 * PAGE, least=PAGE) == 6 * PAGE
    assert other.claim(8 * PAGE, least=PAGE) == 0


def test_a_partial_claim_is_whole_pages_or_the_least(account: Account, other: Account) -> None:
    account.claim(10 * PAGE + 1)
    assert other.claim(8 * PAGE, least=PAGE) == 5 * PAGE
    assert other.claim(8 * PAGE, least=4096) == 4096


def test_tiers_are_counted_apart(ledger: Ledger, account: Account) -> None:
    account.claim(CAPACITY)
    assert ledger.open_account("nvme", CAPACITY).claim(CAPACITY)
    assert (ledger.used("dram"), ledger.used("nvme")) == (CAPACITY, CAPACITY)


def test_each_claim_is_judged_by_the_claimers_own_capacity(ledger: Ledger, account: Account) -> None:
    account.claim(10 * PAGE)
    assert not ledger.open_account("dram", 10 * PAGE).claim(PAGE)
    assert ledger.open_account("dram", 2 * CAPACITY).claim(CAPACITY)
    assert not account.claim(PAGE)


def test_who_holds_nothing_leaves_nothing(ledger: Ledger, account: Account) -> None:
    account.claim(3 * PAGE)
    assert len(files(ledger)) == 1
    account.release(PAGE), account.release(2 * PAGE)
    assert files(ledger) == []


def test_a_refusal_is_said_once_with_who_holds_the_rest(
    account: Account, other: Account, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/pre-train 1.py"])
    account.claim(CAPACITY)
    other.claim(PAGE), other.claim(PAGE)
    assert [record.getMessage() for record in caplog.records] == [
        "dram stays at 0 B for now: 32.0 MiB of the node's 32.0 MiB are held elsewhere (32.0 MiB by this "
        f"process, pid {os.getpid()}); raise TIERS_DRAM if the node has more"
    ]


def test_of_many_who_hold_something_the_largest_are_told() -> None:
    holders = [Holder(number * PAGE, number, "train.py") for number in range(1, 7)]
    assert describe_holders(holders) == (
        "12.0 MiB by pid 6 (train.py), 10.0 MiB by pid 5 (train.py), 8.0 MiB by pid 4 (train.py), 6.0 MiB by pid 3 "
        "(train.py) and more by 2 others"
    )


@pytest.mark.parametrize(
    ("argv", "name"),
    [(["-c"], "python"), ([""], "python"), ([], "python"), (["/a/trainer/__main__.py"], "trainer")],
)
def test_a_process_has_a_name_in_the_ledger(
    argv: list[str], name: str, account: Account, other: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    account.claim(PAGE)
    other.claim(PAGE)
    assert other.others == (Holder(PAGE, os.getpid(), name),)


# -------------------------------------------------------------------------------------- processes


def test_two_processes_that_race_never_exceed_it_together(
    ledger: Ledger, start: Callable[..., subprocess.Popen[str]]
) -> None:
    race = """
print("ready", flush=True)
begin = float(input())
while time.time() < begin: pass
print(sum(account.claim(PAGE // 64) for _ in range(1200)), flush=True)
input()
"""
    racers = [start(race) for _ in range(2)]
    assert [said(racer) for racer in racers] == ["ready", "ready"]
    begin = time.time() + 0.05
    for racer in racers:
        print(begin, file=racer.stdin, flush=True)
    assert sum(int(said(racer)) for racer in racers) == ledger.used("dram") == CAPACITY


def test_a_killed_process_gives_its_share_back(
    ledger: Ledger, account: Account, start: Callable[..., subprocess.Popen[str]]
) -> None:
    victim = start("print(account.claim(10 * PAGE), flush=True)\ninput()")
    assert said(victim) == str(10 * PAGE)
    assert not account.claim(CAPACITY)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert account.claim(CAPACITY)
    assert len(files(ledger)) == 1  # and what it left is gone


def test_a_share_does_not_live_on_in_a_fork_of_the_dead(
    account: Account, start: Callable[..., subprocess.Popen[str]]
) -> None:
    fork = """
account.claim(10 * PAGE)
if os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(60)
os.wait()
"""
    parent = start(fork)
    child = int(said(parent))
    try:
        parent.kill()
        parent.wait()
        assert account.claim(CAPACITY)
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.filterwarnings("default:.* is multi-threaded, use of fork")
def test_a_fork_has_an_account_of_its_own(ledger: Ledger, account: Account) -> None:
    account.claim(10 * PAGE)
    if (child := os.fork()) == 0:
        account.release(10 * PAGE)  # the parent's
        right = ledger.used("dram") == 10 * PAGE and account.claim(4 * PAGE) and not account.claim(4 * PAGE)
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ledger.used("dram") == 10 * PAGE


@pytest.mark.filterwarnings("default:.* is multi-threaded, use of fork")
def test_forks_during_claims_do_not_hang(ledger: Ledger) -> None:
    over = threading.Event()

    def claim_and_release() -> None:
        account = ledger.open_account("dram", CAPACITY)
        while not over.is_set():
            account.release(account.claim(PAGE))

    thread = threading.Thread(target=claim_and_release)
    thread.start()
    for _ in range(50):
        if (child := os.fork()) == 0:
            os._exit(0 if ledger.open_account("dram", CAPACITY).claim(PAGE) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    over.set()
    thread.join()


def test_many_threads_share_an_account(ledger: Ledger, account: Account) -> None:
    got: list[int] = []

    def work() -> None:
        for _ in range(100):
            granted = account.claim(PAGE)
            got.append(ledger.used("dram"))
            if granted:
                account.release(granted)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(got) <= CAPACITY
    assert ledger.used("dram") == 0


STOPPED = """
from torch_tiers.allocator.host import ledger
with ledger._locked(account._directory):
    print("locked", flush=True)
    input()
print("unlocked", flush=True)
input()
"""


def test_a_process_that_is_stopped_while_it_counts_does_not_stop_the_others(
    ledger: Ledger,
    account: Account,
    start: Callable[..., subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(accounts, "PATIENCE", 0.2)
    account.claim(PAGE)
    stopped = start(STOPPED)
    assert said(stopped) == "locked"
    stopped.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    assert (account.claim(CAPACITY), account.claim(3 * PAGE)) == (0, 3 * PAGE)  # alone
    with pytest.raises(TimeoutError, match="stopped"):
        ledger.used("dram")
    assert 0.2 <= time.monotonic() - began < 5
    assert [record.getMessage().count("without regard") for record in caplog.records] == [1]
    stopped.send_signal(signal.SIGCONT)
    print(file=stopped.stdin, flush=True)
    assert said(stopped) == "unlocked"
    assert account.claim(PAGE)
    assert ledger.used("dram") == 5 * PAGE  # and what was claimed alone is published


def test_a_ledger_that_is_busy_is_the_one_where_all_meet(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]], ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another directory what others hold counted for nothing: the node's capacities were handed out twice."""
    monkeypatch.setattr(accounts, "PATIENCE", 0.1)
    monkeypatch.setattr(shares, "LEDGERS", (tmp_path / "first", tmp_path / "second"))
    monkeypatch.setattr(shares, "of_user", lambda place: ledger.directory if place.name == "first" else place)
    stopped = start(STOPPED)
    assert said(stopped) == "locked"
    for named in ({}, {"ledger": str(ledger.directory)}):
        config = load(named, environ={}, cwd=tmp_path).config
        opened = shares.Shares(config).ledger
        assert opened is not None and opened.directory == ledger.directory
    assert not (tmp_path / "second").exists()


def test_while_a_ledger_is_busy_what_others_held_still_counts(
    account: Account, other: Account, start: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounts, "PATIENCE", 0.1)
    other.claim(12 * PAGE)
    account.claim(PAGE)
    stopped = start(STOPPED)
    assert said(stopped) == "locked"
    assert (account.claim(4 * PAGE), account.claim(3 * PAGE)) == (0, 3 * PAGE)


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENOMEM])
def test_a_ledger_for_which_files_are_lacking_for_now_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def lacking(path: Path) -> Iterator[int]:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(accounts, "_locked", contextmanager(lacking))
    assert Ledger(tmp_path / "ledger").directory == tmp_path / "ledger"


@pytest.mark.filterwarnings("default:.* is multi-threaded, use of fork")
def test_a_fork_does_not_wait_long_for_a_process_that_is_stopped(
    account: Account, start: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounts, "PATIENCE", 0.5)
    stopped = start(STOPPED)
    assert said(stopped) == "locked"
    stopped.send_signal(signal.SIGSTOP)
    claiming = threading.Thread(target=account.claim, args=(PAGE,))
    claiming.start()
    time.sleep(0.1)
    began = time.monotonic()
    if (child := os.fork()) == 0:
        os._exit(0)
    assert time.monotonic() - began < 10
    os.waitpid(child, 0)
    claiming.join()


def test_what_others_hold_is_not_waited_for_at_a_start(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]], ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounts, "PATIENCE", 0.1)

    def open_stuck(config: object) -> Ledger:
        stopped = start(STOPPED)
        assert said(stopped) == "locked"
        stopped.send_signal(signal.SIGSTOP)
        return ledger

    monkeypatch.setattr(shares, "_open_ledger", open_stuck)
    assert shares.Shares(load({}, environ={}, cwd=tmp_path).config).dram > 0


# ----------------------------------------------------------------------------------------- damage


def test_files_of_nobody_do_not_count(ledger: Ledger, account: Account) -> None:
    (ledger.directory / "dram-1-left").write_bytes(b"\xff" * 100)
    os.truncate(ledger.directory / "dram-1-left", 1 << 40)
    (ledger.directory / "something else").write_text("that is left alone")
    assert account.claim(CAPACITY)
    assert "dram-1-left" not in files(ledger)
    assert "something else" in files(ledger)


@pytest.mark.parametrize("size", [0, 1, 1 << 40])
def test_a_damaged_file_is_right_again_with_the_next_claim(ledger: Ledger, account: Account, size: int) -> None:
    account.claim(3 * PAGE)
    os.truncate(ledger.directory / files(ledger)[0], size)
    assert account.claim(PAGE)
    assert ledger.used("dram") == 4 * PAGE


def test_a_removed_directory_is_recomputed(ledger: Ledger, account: Account, other: Account) -> None:
    """As logind removes what a user has in /dev/shm when he logs out for the last time."""
    account.claim(3 * PAGE)
    shutil.rmtree(ledger.directory)
    assert other.claim(PAGE)
    assert account.claim(PAGE)
    assert ledger.used("dram") == 5 * PAGE


def test_without_its_ledger_an_account_goes_on_alone_and_says_so(
    ledger: Ledger, account: Account, caplog: pytest.LogCaptureFixture
) -> None:
    account.claim(3 * PAGE)
    shutil.rmtree(ledger.directory)
    ledger.directory.write_text("in the way")
    assert (account.claim(CAPACITY), account.claim(13 * PAGE), account.claim(PAGE)) == (0, 13 * PAGE, 0)
    account.release(CAPACITY)
    assert [record.getMessage().count("without regard") for record in caplog.records] == [1]


def test_only_the_user_may_look_into_it(ledger: Ledger, account: Account) -> None:
    account.claim(PAGE)
    assert ledger.directory.stat().st_mode & 0o777 == 0o700
    assert (ledger.directory / files(ledger)[0]).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path, mode: int) -> None:
    place = tmp_path / "open"
    place.mkdir()
    place.chmod(mode)
    with pytest.raises(PermissionError, match="not private"):
        Ledger(place)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_another_users_directory_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    place = tmp_path / "theirs"
    place.mkdir(mode=0o700)
    (place / "dram-1-theirs").touch()
    os.chown(place, 65534, 65534)
    with pytest.raises(PermissionError, match="not private"):
        Ledger(place)
    assert os.listdir(place) == ["dram-1-theirs"]


def test_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("elsewhere")
    with pytest.raises(OSError):
        Ledger(tmp_path / "link")


# ---------------------------------------------------------------------------------- arena, store


def test_an_arena_has_reached_its_capacity_while_others_hold_the_rest(account: Account, other: Account) -> None:
    other.claim(12 * PAGE)
    arena = DramArena(CAPACITY, pinned=False, step=4 * PAGE, account=account)
    assert arena.allocate(3 * PAGE) and arena.allocate(3 * PAGE) is None
    assert arena.capacity == arena.grown == 4 * PAGE
    other.release(12 * PAGE)
    assert arena.allocate(3 * PAGE)
    assert arena.capacity == CAPACITY
    arena.close()


def test_an_arena_takes_less_than_a_step_where_that_is_left(account: Account, other: Account) -> None:
    other.claim(13 * PAGE)
    arena = DramArena(CAPACITY, pinned=False, step=4 * PAGE, account=account)
    assert arena.allocate(PAGE)
    assert arena.grown == 3 * PAGE
    arena.close()


def test_what_an_arena_has_idle_serves_its_own_larger_request(account: Account, other: Account) -> None:
    arena = DramArena(CAPACITY, pinned=False, step=2 * PAGE, account=account)
    for block in [arena.allocate(2 * PAGE) for _ in range(3)]:
        assert block is not None
        arena.free(block)
    other.claim(10 * PAGE)
    assert arena.allocate(6 * PAGE)
    arena.close()


def test_a_closed_arena_gives_back(ledger: Ledger, account: Account) -> None:
    arena = DramArena(CAPACITY, pinned=False, step=2 * PAGE, account=account)
    keep, drop = arena.allocate(2 * PAGE), arena.allocate(4 * PAGE)
    assert keep and drop and ledger.used("dram") == 6 * PAGE
    arena.free(drop)
    arena.close()
    arena.close()
    assert ledger.used("dram") == 0


@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate memory"), KeyboardInterrupt()])
def test_what_an_arena_does_not_get_it_does_not_hold(
    ledger: Ledger, account: Account, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def refuse(nbytes: int, node: int | None) -> None:
        raise error

    monkeypatch.setattr(mappings, "map_pages", refuse)
    arena = DramArena(CAPACITY, pinned=False, account=account)
    try:
        assert arena.allocate(PAGE) is None
    except KeyboardInterrupt:
        assert isinstance(error, KeyboardInterrupt)
    assert ledger.used("dram") == 0


def test_a_reservation_ends_where_others_hold_the_rest(account: Account, other: Account) -> None:
    other.claim(10 * PAGE)
    arena = DramArena(CAPACITY, pinned=False, step=4 * PAGE, account=account)
    arena.reserve(CAPACITY)
    assert eventually(lambda: arena.grown == 6 * PAGE)
    other.release(4 * PAGE)
    assert eventually(lambda: arena.grown == 10 * PAGE)
    arena.close()


def test_a_store_shares_the_capacity_and_gives_it_back_when_closed(tmp_path: Path, ledger: Ledger) -> None:
    account, other = (ledger.open_account("nvme", CAPACITY) for _ in range(2))
    other.claim(12 * PAGE)
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    store = NvmeStore(paths, CAPACITY, gds="off", stripe=MiB, step=PAGE, account=account)
    assert store.allocate(4 * PAGE) and store.allocate(MiB) is None
    assert store.capacity == 4 * PAGE
    other.release(12 * PAGE)
    assert store.allocate(MiB)
    store.close()
    store.close()
    assert ledger.used("nvme") == 0


def test_a_full_disk_leaves_nothing_claimed(tmp_path: Path, ledger: Ledger) -> None:
    account = ledger.open_account("nvme", CAPACITY)
    (tmp_path / "a").mkdir()

    def open_full(path: Path) -> FaultyFile:
        return FaultyFile(PosixFile(path), full_at=3 * MiB)

    store = NvmeStore(
        [tmp_path / "a"], CAPACITY, gds="off", stripe=MiB, step=8 * MiB, backend=open_full, account=account
    )
    while store.allocate(MiB):
        pass
    assert ledger.used("nvme") == store.capacity <= 3 * MiB
    store.close()


# ---------------------------------------------------------------------------------------- session


def test_a_rank_may_have_all_of_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "LEDGERS", (tmp_path,))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    budget = Session(load({"dram": "64MiB"}, environ={}, cwd=tmp_path).config).stats()["budget"]
    assert budget["dram"] == 64 * MiB


def test_without_a_ledger_each_rank_has_an_equal_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "LEDGERS", (tmp_path / "nowhere", tmp_path / "neither"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    budget = Session(load({"dram": "64MiB"}, environ={}, cwd=tmp_path).config).stats()["budget"]
    assert budget["dram"] == 32 * MiB


def test_that_there_is_no_ledger_is_said_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shares, "LEDGERS", (tmp_path / "nowhere" / "at all",))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "")  # counts as not set
    shares.Shares(load({}, environ={}, cwd=tmp_path).config).say_if_alone()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "1/1 of the capacities" in line and line.endswith("in TIERS_LEDGER")


def test_a_session_keeps_its_accounts_in_the_ledger_that_is_named(tmp_path: Path) -> None:
    named = tmp_path / "ledger"
    config = load({"dram": "64MiB", "ledger": str(named)}, environ={}, cwd=tmp_path).config
    account = shares.Shares(config).account("dram", 64 * MiB)
    assert account is not None
    account.claim(4 * PAGE)
    assert Ledger(named).used("dram") == 4 * PAGE


@pytest.mark.parametrize("name", ["nowhere/ledger", "open", "file"])
def test_a_ledger_that_cannot_be_used_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "file").touch()
    config = load({"ledger": str(tmp_path / name)}, environ={}, cwd=tmp_path).config
    with pytest.raises(ConfigError, match=rf"TIERS_LEDGER: no ledger can be kept at {tmp_path / name}"):
        Session(config)
