"""``tiers doctor``."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from importlib.metadata import entry_points

from rich.table import Column, Table
from rich.text import Text

from torch_tiers.allocator.nvme.decide import Decision, decide
from torch_tiers.cli.verb import print_json, print_tables
from torch_tiers.config import Config, ConfigError, load
from torch_tiers.doctor import Finding, TorchFacts, examine
from torch_tiers.monitor.build import available_sensors, read_curves
from torch_tiers.places import cache_directory
from torch_tiers.topology import discover

_STYLE = {"ok": "green", "degraded": "yellow", "missing": "red"}


class DoctorVerb:
    """Look at the machine and say what is fine, what is slower than it could be, and what to do.

    Exit code 1 if something that is configured cannot run.
    """

    name = "doctor"

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Take no arguments of its own."""

    def run(self, args: argparse.Namespace) -> int:
        """Look and print."""
        config, first = _config()
        sensors = available_sensors(probe=config.monitor.probe) if config.monitor.enabled else None
        torch = _torch_facts()
        findings = [first, *examine(discover(), config, torch, _ways(config, torch), sensors)]
        if args.json:
            print_json({"findings": [asdict(finding) for finding in findings]})
        else:
            table = Table("", "status", Column("found", overflow="fold"), Column("what to do", overflow="fold"))
            for finding in findings:
                status = Text(finding.status, style=_STYLE[finding.status])
                table.add_row(finding.subject, status, finding.found, finding.advice)
            print_tables([table])
        return int(any(finding.status == "missing" for finding in findings))


def _config() -> tuple[Config, Finding]:
    """The configuration and what is to be said of it; the defaults if it is wrong, to look at the rest."""
    try:
        resolved = load()
        if resolved.config.monitor.enabled:
            read_curves(resolved.config.monitor.calibration)
    except ConfigError as error:
        return Config(), Finding("config", "missing", str(error), "correct it; the rest assumes the defaults")
    if resolved.warnings:
        return resolved.config, Finding("config", "degraded", "; ".join(resolved.warnings))
    return resolved.config, Finding("config", "ok", f"allocator {resolved.config.allocator}")


def _ways(config: Config, torch: TorchFacts | None) -> Decision:
    """What a run decides; without torch there is none, and no GPU that it would use."""
    paths = config.nvme.paths if config.nvme.capacity else ()
    if torch is None:
        return decide(paths, "prefer", None, None, measuring=None)
    from torch_tiers.allocator.nvme.choose import foresee

    return foresee(paths, config.nvme.gds, cache_directory(), host_alone=True)


def _torch_facts() -> TorchFacts | None:
    autoload = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "0"
    # Importing torch must not start the very thing that is being examined.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    try:
        import torch
    except (ImportError, OSError):
        return None
    from torch_tiers.allocator.extensions.extension import obstacle_to
    from torch_tiers.allocator.native.copy import lane
    from torch_tiers.allocator.native.pytorch import adapter
    from torch_tiers.migrator.saved import native

    return TorchFacts(
        version=torch.__version__,
        cuda=torch.version.cuda,
        sees_gpu=torch.cuda.is_available(),
        loads_tiers=autoload and any(entry_points(group="torch.backends", name="tiers")),
        obstacle=adapter.obstacle(),
        hooks_obstacle=native.MODULE.obstacle(cache_directory()),
        lanes_obstacle=obstacle_to(lane.load),
    )
