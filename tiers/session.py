"""How a session begins: by the environment (`install`), or in code (`session`)."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Literal, TypeAlias

from torch_tiers import put_off
from torch_tiers.assembly import Session
from torch_tiers.config import Config, ConfigError, load
from torch_tiers.config_keys import USUAL_ALLOCATOR
from torch_tiers.log import set_up
from torch_tiers.refusals import give_up
from torch_tiers.spoken import describe

log = logging.getLogger("tiers")

_opened: list[Session] = []  # at most one, as a second is refused

Size: TypeAlias = int | str  # bytes, or such as "24GiB"
Place: TypeAlias = str | os.PathLike[str]


def install(config: Config) -> None:
    """Start a session that lasts as long as the process. Registers only; touches no device.

    Raises
    ------
    ConfigError
        If the run directory holds an earlier run.
    """
    session = Session(config, refuse=give_up)
    session.open()
    _opened.append(session)
    # Registered after PyTorch's own exit handlers, and so run before them: while the driver is still up.
    atexit.register(session.close, at_exit=True)


def current() -> Session | None:
    """The session of this process, if there is one."""
    return _opened[-1] if _opened else None


class session(contextlib.AbstractContextManager[Session]):
    """Run what is inside with tiers.

    Values go before those of the environment and of files; what is None, or left out, is taken from there.

    Parameters
    ----------
    config : path, optional
        A file to read in place of ``./tiers.toml``.
    allocator : {"pages", "torch"}, optional
        Ours under PyTorch, or PyTorch's own. Where none is configured it is ``pages``; then open the session before
        the program first uses CUDA. Where ours cannot be used a warning says why, and PyTorch's own is.
    policy : str, optional
        ``auto``, ``keep`` (nothing moves), ``move`` (everything does), or one that ``tiers plan --help`` lists.
    hbm : int or str, optional
        Budget per GPU, such as ``"24GiB"``; a share of what the program needs, such as ``"60%"``; or ``"all"``.
    hbm_strict : bool, optional
        Whether the first steps stay within `hbm`, too, where `nvme` would have to take what they save and HBM is free.
    dram, nvme : int or str, optional
        Capacity per node; of `nvme` over all of its directories.
    nvme_path : path or sequence of paths, optional
        The directories for what goes to `nvme`.
    nvme_gds : {"require", "prefer", "off"}, optional
        Whether GPUDirect Storage is to be there.
    nvme_checksum : bool, optional
        Whether what is read from `nvme` is checked.
    monitor_enabled, monitor_probe : bool, optional
        Whether we make way for others on the memory bus, and time a small copy now and then to see them.
    monitor_calibration : path, optional
        A report of ``tiers probe``.
    links_d2h, links_h2d, links_disk_write, links_disk_read, links_gds_write, links_gds_read : float, optional
        Bytes per second of each lane, as measured.
    replay : bool, optional
        Whether what is dropped is made again by the operators that made it.
    plan_cache : bool, optional
        Whether plans are kept, and a program begins with those of its last run.
    ledger : path, optional
        The directory through which the processes of a node share the capacities.
    run : path, optional
        The directory that receives what ``tiers report`` reads.
    run_force : bool, optional
        Whether an earlier run in that directory is overwritten.
    log : {"debug", "info", "warning", "error"}, optional
        From which level on we say what happens.

    Raises
    ------
    ConfigError
        On a value that its key does not accept.

    Examples
    --------
    >>> with tiers.session(hbm="20GiB", dram="64GiB"):  # doctest: +SKIP
    ...     train()
    """

    def __init__(
        self,
        *,
        config: Place | None = None,
        allocator: Literal["pages", "torch"] | None = None,
        policy: str | None = None,
        hbm: Size | None = None,
        hbm_strict: bool | None = None,
        dram: Size | None = None,
        nvme: Size | None = None,
        nvme_path: Place | Sequence[Place] | None = None,
        nvme_gds: Literal["require", "prefer", "off"] | None = None,
        nvme_checksum: bool | None = None,
        monitor_enabled: bool | None = None,
        monitor_probe: bool | None = None,
        monitor_calibration: Place | None = None,
        links_d2h: float | None = None,
        links_h2d: float | None = None,
        links_disk_write: float | None = None,
        links_disk_read: float | None = None,
        links_gds_write: float | None = None,
        links_gds_read: float | None = None,
        replay: bool | None = None,
        plan_cache: bool | None = None,
        ledger: Place | None = None,
        run: Place | None = None,
        run_force: bool | None = None,
        log: Literal["debug", "info", "warning", "error"] | None = None,
    ) -> None:
        resolved = load({name: value for name, value in locals().items() if name != "self"})
        self._warnings = resolved.warnings
        self._speaks = resolved.origin["log"] != "default"  # else the level stays as the program has it
        asked = resolved.config
        if asked.allocator == "off" and resolved.origin["allocator"].startswith("argument"):
            raise ConfigError(
                f"allocator is off ({resolved.origin['allocator']}): without a session the program is plain"
            )
        self._config = replace(asked, allocator=USUAL_ALLOCATOR) if asked.allocator == "off" else asked
        self._session: Session | None = None

    def __repr__(self) -> str:
        if self._session is not None:
            return repr(self._session)
        return f"<session: {describe(self._config)}, not opened>"

    def __enter__(self) -> Session:
        if self._speaks:
            set_up(self._config.log)
        for warning in self._warnings:
            log.warning(warning)
        self._session = Session(self._config)
        self._session.open()
        _opened.append(self._session)
        return self._session

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            self._session.close()
            if self._session in _opened:
                _opened.remove(self._session)


put_off.session_is_whole()
