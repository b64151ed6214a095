"""A run without tiers, of which the losses are kept: what a run with tiers is compared with."""

from __future__ import annotations

import atexit
import logging
import os
from contextlib import suppress
from pathlib import Path

from torch_tiers import run_directory
from torch_tiers.config import Config
from torch_tiers.migrator.program.losses import Losses
from torch_tiers.sigterm import BeforeSigterm

log = logging.getLogger("tiers")


def install(config: Config) -> None:
    """Keep the losses of this process, and write them into `config.run` as it ends. Nothing else is changed.

    Raises
    ------
    ConfigError
        If the run directory holds an earlier run.
    """
    directory = run_directory.find(config)
    if directory is not None:
        _PlainRun(directory, force=config.run_force)


class _PlainRun:
    def __init__(self, directory: Path, *, force: bool) -> None:
        self._directory, self._force = directory, force
        self._pid = os.getpid()
        self._before_sigterm = BeforeSigterm(self._write)
        self._losses = Losses(begun=self._begin)
        self._losses.install()
        atexit.register(self._end)

    def _begin(self) -> None:
        """This process trains, so an earlier run makes way for it if that was asked for."""
        with suppress(OSError):  # said when this one's is written
            for name in run_directory.FILES if self._force else ():
                (self._directory / name).unlink(missing_ok=True)
        self._before_sigterm.set()

    def _end(self) -> None:
        if os.getpid() == self._pid:
            self._losses.uninstall()
            self._before_sigterm.clear()
            self._write()

    def _write(self) -> None:
        try:
            with suppress(RuntimeError):  # of a device, which the program has met before
                self._directory = run_directory.write_losses(self._directory, self._losses.read(), force=self._force)
                self._force = True  # a SIGTERM may not end the program: that of a container's first process
        except OSError as error:
            log.error("TIERS_RUN: %s cannot be written: %s", self._directory, error.strerror or error)
