"""Puts the monitor together from the configuration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

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


def available_sensors(*, probe: bool) -> Choice:
    """The best sensors of this machine; of those that tell the same, the one with the least to ask for."""
    rows: list[list[Sensor]] = [[Resctrl(), Uncore()], [Pcie()], [Pressure()], [Cores()]]
    return choose([*rows, [TimedCopy()]] if probe else rows)


def build(config: Config, places: Sequence[Path], timeline: Timeline | None = None) -> Monitor | None:
    """Make the monitor, or return None if it is switched off.

    Parameters
    ----------
    places
        Directories of which the first that serves shows its state; none if it is shown nowhere.
    timeline
        Is told of its changes of mind, if there is one.

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
    return Monitor(watch, Board(*places) if places else None)


def read_curves(path: Path | None) -> dict[str, Curve]:
    """The curves of ``monitor.calibration``; ConfigError if it is no report of ``tiers probe --contention``."""
    if path is None:
        return {}
    try:
        return curves_of(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"monitor.calibration: {path}: {error}; make one with tiers probe --contention --json > {path}"
        ) from None
