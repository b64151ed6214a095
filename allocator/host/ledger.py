"""Counts what all processes of one user hold of the node's memory, so that together they stay within its capacity.

The ledger is a private directory. Each account that holds something is a file in it: its name says whose it is, and it
is sparse and as long as the bytes that are held, so that ``ls -l`` shows who has what. The owner keeps the file
flock'ed. The kernel drops that lock when the process ends, however it ends and in whatever pid namespace; so a file
whose lock can be taken belongs to nobody, and the next claim removes it. The process itself knows what its account
holds; the file only publishes it, and is made anew if somebody removes it. So nothing on disk can be stale.

Locks: a claim holds a flock on the directory while it counts, so that two processes never see the same room. `_lock`
lets one thread at a time do so, and is held across a fork: no child inherits a claim under way. Nothing is logged under
it, because a fork takes the locks of logging as well. A process that is stopped while it counts would stop all others,
so these wait for a limited time.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torch_tiers.allocator.holders import Claims, Holder, describe_holders
from torch_tiers.allocator.private import ACCESSIBLE, opened
from torch_tiers.allocator.sizes import PAGE, format_size

log = logging.getLogger("tiers")

PATIENCE = 2.0  # seconds for others to count, which takes them some ten microseconds
PATIENCE_AFTER = 0.02  # the same for who has waited in vain, until the lock can be had again

BUSY = frozenset({errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EBUSY})
"""Errors that do not mean that there can be no ledger: it can be used later."""

_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC
_LONGEST_PAUSE = 0.005  # seconds between two tries
_LONGEST_NAME = 40  # of a program, in an account's

_lock = threading.Lock()
_published: set[Account] = set()  # those of this process that have a file
_stuck: set[Path] = set()  # directories that were waited for in vain


class Ledger:
    """The ledger in `directory`, which is made if it does not exist.

    Parameters
    ----------
    directory
        In a place that all processes of the user see. A tmpfs suits best: nothing in it outlives the machine.

    Raises
    ------
    OSError
        If it cannot be made, or other users have access to it. Not if it is busy: then an account logs that.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            with _lock, _locked(directory):
                pass
        except OSError as error:
            if error.errno not in BUSY:
                raise

    def used(self, tier: str) -> int:
        """Bytes of `tier` that all processes hold now. OSError if they cannot be counted."""
        with _lock, _locked(self.directory) as directory:
            return _total(_holders(directory, tier).values())

    def open_account(self, tier: str, capacity: int, claims: Claims | None = None) -> Account:
        """Make an account that holds nothing yet.

        Parameters
        ----------
        capacity
            Bytes of `tier` that all processes may hold when this one claims; others may see it differently.
        claims
            Is told of its claims; if not given, one of its own.
        """
        return Account(self.directory, tier, capacity, claims)


class Account:
    """The bytes that one arena or store holds of its tier. Thread-safe; made by `Ledger.open_account`.

    First come, first served: no process has a share that is kept for it. In a forked child the account holds nothing.
    If the ledger cannot be used any more, the account logs so and goes on with what others held when it last could.

    Attributes
    ----------
    others : tuple of Holder
        Who else held something of the tier at this account's last claim.
    claims : Claims
        What this process met at its claims.
    """

    def __init__(self, directory: Path, tier: str, capacity: int, claims: Claims | None = None) -> None:
        self.claims = Claims() if claims is None else claims
        self._directory = directory
        self._tier = tier
        self._capacity = capacity
        self._held = 0
        self._file: int | None = None
        self._name = ""
        self._said: set[str] = set()
        self.others: tuple[Holder, ...] = ()

    def claim(self, nbytes: int, least: int | None = None, *, say: bool = True) -> int:
        """Claim `nbytes`, or what is left of them, in whole pages, if that is at least `least`.

        Takes some ten microseconds, and some more for each account in the ledger.

        Parameters
        ----------
        least
            `nbytes` if not given: all or nothing.
        say
            Whether a refusal is logged, once.

        Returns
        -------
        int
            Bytes claimed; 0 if the node's capacity is reached.
        """
        least = nbytes if least is None else least
        failure: OSError | None = None
        with _lock:
            try:
                with _locked(self._directory) as directory:
                    if self._held:
                        self._publish(directory, self._held)
                    holders = _holders(directory, self._tier)
                    self.others = tuple(holder for name, holder in holders.items() if name != self._name)
                    granted = self._grant(nbytes, least)
                    if granted:
                        self._publish(directory, self._held + granted)
            except OSError as error:
                failure = error
                granted = self._grant(nbytes, least)
            self._held += granted
            held, others = self._held, self.others
        self.claims.claimed(granted, nbytes, held - granted, others)
        if failure is not None:
            self._say_once("%s is taken without regard to other processes: %s", self._tier, failure)
        elif say and not granted:
            sizes = (format_size(size) for size in (held, _total(others), self._capacity))
            facts = (*sizes, f" ({describe_holders(others)})" if others else "", f"TIERS_{self._tier.upper()}")
            text = "%s stays at %s for now: %s of the node's %s are held elsewhere%s; raise %s if the node has more"
            self._say_once(text, self._tier, *facts)
        return granted

    def release(self, nbytes: int) -> None:
        """Release `nbytes` of what was claimed."""
        with _lock:
            self._held = max(self._held - nbytes, 0)  # a forked child may release what only its parent holds
            if self._file is None:
                return
            if self._held:
                os.ftruncate(self._file, self._held)
            else:
                with suppress(OSError):  # without its lock, the next claim would remove it
                    os.unlink(self._directory / self._name)
                self._forget_file()

    def _grant(self, nbytes: int, least: int) -> int:
        left = self._capacity - self._held - _total(self.others)
        if nbytes <= left:
            return nbytes
        return max(left - left % PAGE, least) if least <= left else 0

    def _publish(self, directory: int, nbytes: int) -> None:
        """Write `nbytes` down; the caller holds the directory's lock, so nobody sees a file without its lock."""
        if self._file is not None and not os.fstat(self._file).st_nlink:
            self._forget_file()  # removed under our feet, as logind does at a user's last logout
        if self._file is None:
            self._name = f"{self._tier}-{os.getpid()}-{_program()}-{secrets.token_hex(4)}"
            self._file = os.open(self._name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600, dir_fd=directory)
            _published.add(self)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(self._file, nbytes)

    def _forget_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
        _published.discard(self)

    def _say_once(self, text: str, *values: object) -> None:
        if text not in self._said:
            self._said.add(text)
            log.warning(text, *values)


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Open and lock the directory at `path`; the caller holds `_lock`."""
    with opened(path, make=True, denied=ACCESSIBLE) as directory:
        _lock_in_time(directory, path)
        yield directory


def _lock_in_time(directory: int, path: Path) -> None:
    deadline = time.monotonic() + (PATIENCE_AFTER if path in _stuck else PATIENCE)
    pause = 0.0001
    while True:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                _stuck.add(path)
                reason = "is locked for long, by a process that is stopped (state T in ps): continue or end that"
                raise TimeoutError(errno.ETIMEDOUT, reason, str(path)) from error
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        else:
            _stuck.discard(path)
            return


def _program() -> str:
    """What the program is called, as far as a file may be."""
    path = Path(sys.argv[0]) if getattr(sys, "argv", None) else Path()
    name = path.parent.name if path.name == "__main__.py" else path.name
    return "python" if name in ("", "-c", "-m") else re.sub(r"[^A-Za-z0-9._+-]", "_", name)[:_LONGEST_NAME]


def _total(holders: Iterable[Holder]) -> int:
    return sum(holder.nbytes for holder in holders)


def _holders(directory: int, tier: str) -> dict[str, Holder]:
    """The running processes that hold something, by account name; files of those that have ended are removed."""
    holders: dict[str, Holder] = {}
    for name in os.listdir(directory):
        if not name.startswith(f"{tier}-"):
            continue
        with suppress(FileNotFoundError):  # released since it was listed
            file = os.open(name, os.O_RDWR | _FLAGS, dir_fd=directory)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(name, dir_fd=directory)
            except BlockingIOError:
                _, pid, *program = name.split("-")
                of = int(pid) if pid.isdecimal() else 0
                holders[name] = Holder(os.fstat(file).st_size, of, "-".join(program[:-1]) or "python")
            finally:
                os.close(file)
    return holders


def _after_fork_in_child() -> None:
    # The child has the parent's files and with them its locks, which would outlive the parent.
    for account in list(_published):
        account._forget_file()
        account._held, account._name = 0, ""  # by that name it is the parent's
    _lock.release()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_after_fork_in_child)
