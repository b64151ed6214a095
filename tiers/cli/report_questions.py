"""``tiers report`` with one question: why a step was slow, which module moves most, whether the loss changed."""

from __future__ import annotations

from pathlib import Path

from torch_tiers.cli.run_files import read_json
from torch_tiers.cli.verb import FAILED, print_json, print_tables
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.planning import by_module, slow_step
from torch_tiers.planning import losses as compared
from torch_tiers.run_directory import LOSSES, TIMELINE


def step(directory: Path, number: int, recomputing: float, *, as_json: bool) -> int:
    """Print why a step took what it took; `recomputing` is what the plan foresees of that, in seconds."""
    told = slow_step.look_at(read_json(directory / TIMELINE, slow_step.recorded_from_json), number)
    if as_json:
        print_json(slow_step.to_json(told))
    else:
        print_tables(slow_step.render(told, recomputing))
    return 0


def modules(trace: Trace, plan: Plan, *, as_json: bool) -> int:
    """Print what each module moves, recomputes and keeps."""
    sums = by_module.by_module(trace, plan)
    if as_json:
        print_json(by_module.to_json(sums))
    else:
        print_tables(by_module.render(sums))
    return 0


def losses(directory: Path, other: Path, *, as_json: bool) -> int:
    """Print whether two runs have the same losses. Returns 1 if they have not, or there is nothing to compare."""
    one, another = (
        read_json(path if path.suffix == ".csv" else path / LOSSES, compared.losses_from_csv)
        for path in (directory, other)
    )
    told = compared.compare(one, another)
    if as_json:
        print_json(compared.to_json(told))
    else:
        print_tables(compared.render(told))
    return FAILED if told.differ or not told.compared else 0
