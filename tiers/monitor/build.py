"""Puts the monitor together from the configuration."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch_tiers.allocator.sizes import MiB, format_size
from torch_tiers.config import Config, ConfigError
from torch_tiers.migrator.telemetry.timeline import Timeline
from torch_tiers.monitor.board import Board
from torch_tiers.monitor.calibration import Calibration, Curve, curves_of
from torch_tiers.monitor.sensors import Choice, Sensor, choose
from torch_tiers.monitor.sensors.copies import Copies
from torch_tiers.monitor.sensors.copy import TimedCopy
from torch_tiers.monitor.sensors.cores import Cores
from torch_tiers.monitor.sensors.pcie import Pcie
from torch_tiers.monitor.sensors.pressure import Pressure
from torch_tiers.monitor.sensors.resctrl import Resctrl
from torch_tiers.monitor.sensors.uncore import Uncore
from torch_tiers.monitor.thread import Monitor
from torch_tiers.monitor.verdict import Judge
from torch_tiers.monitor.watch import Watch

LARGEST = 4 * MiB  # bytes of a report, where one of a large machine has some ten thousand


def available_sensors(*, probe: bool) -> Choice:
    """The best sensors of this machine; of those that tell the same, the one with the least to ask for."""
    rows: list[list[Sensor]] = [[Resctrl(), Uncore()], [Pcie()], [Pressure()], [Cores()]]
    return choose([*rows, [TimedCopy()]] if probe else rows)


def build(
    config: Config,
    places: Sequence[Path],
    timeline: Timeline | None = None,
    beside: Callable[[], Mapping[str, Any]] = dict,
) -> Monitor | None:
    """Make the monitor, or return None if it is switched off.

    Parameters
    ----------
    places
        Directories of which the first that serves shows its state; none if it is shown nowhere.
    timeline
        Is told of its changes of mind, if there is one.
    beside
        See `Monitor`.

    Raises
    ------
    ConfigError
        If ``monitor.calibration`` is no report of ``tiers probe --contention --json``.
    """
    if not config.monitor.enabled:
        return None
    calibration = Calibration(asdict(config.links), read_curves(config.monitor.calibration))
    probe = config.monitor.probe
    watch = Watch(lambda: available_sensors(probe=probe), Copies(calibration), Judge(calibration), timeline=timeline)
    return Monitor(watch, Board(*places) if places else None, beside)


def _text_of(path: Path) -> bytes:
    # A fifo would have us wait, were it not for this flag.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is no regular file")
        text = file.read(LARGEST + 1)
    if len(text) > LARGEST:
        raise ValueError(f"it is larger than {format_size(LARGEST)}, as no report is")
    return text


def read_curves(path: Path | None) -> dict[str, Curve]:
    """The curves of ``monitor.calibration``; ConfigError if it is no report of ``tiers probe --contention``."""
    if path is None:
        return {}
    try:
        return curves_of(json.loads(_text_of(path)))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"monitor.calibration: {path}: {error}; make one with tiers probe --contention --json > {path}"
        ) from None
