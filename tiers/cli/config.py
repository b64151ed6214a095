"""``tiers config``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rich.table import Column, Table

from torch_tiers.allocator.sizes import format_size
from torch_tiers.cli.verb import print_json, print_tables
from torch_tiers.config import flatten, load
from torch_tiers.topology import default_dram_capacity, read_memory

_OFF = (
    "note: these values turn nothing on: programs run as they are without the variable TIERS_ALLOCATOR=pages (or "
    "torch), tiers run, or a tiers.session in code"
)


class ConfigVerb:
    """Print every effective value and where it came from.

    Strongest first: environment, ./tiers.toml (or the file that TIERS_CONFIG names), user config, default.
    """

    name = "config"

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Take no arguments of its own."""

    def run(self, args: argparse.Namespace) -> int:
        """Load and print; a configuration error is the error of this verb."""
        resolved = load(trains=False)
        values = flatten(resolved.config)
        if args.json:
            keys = {key: {"value": value, "origin": resolved.origin[key]} for key, value in values.items()}
            print_json({"keys": keys, "warnings": resolved.warnings})
            return 0
        table = Table("key", Column("value", overflow="fold"), Column("from", overflow="fold"))
        for key, value in values.items():
            table.add_row(key, _show(key, value), resolved.origin[key])
        notes = [f"note: {warning}" for warning in resolved.warnings]
        # A file may name an allocator, too, and alone turns nothing on: `import torch` asks the environment.
        if resolved.config.allocator == "off" or not resolved.origin["allocator"].startswith("environment"):
            notes.append(_OFF)
        print_tables([table, *notes])
        return 0


def _show(key: str, value: object) -> str:
    if value is None:
        return _unset(key)
    if key.endswith(".capacity") and isinstance(value, int):
        return format_size(value)
    if key.startswith("links.") and isinstance(value, float):
        return f"{value / 1e9:.1f} GB/s"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return os.pathsep.join(str(part) for part in value if isinstance(part, Path)) or "none"
    return str(value)


def _unset(key: str) -> str:
    """Say what an unset key means."""
    if key == "hbm.capacity":
        return "all that is free, less a margin"
    if key == "dram.capacity":
        return f"half of the memory that is left: {format_size(default_dram_capacity(read_memory()))}"
    if key == "nvme.capacity":
        return "off"
    if key == "ledger":
        return "this user's, on this node"
    return "not measured" if key.startswith("links.") else "none"
