"""What light recomputation frees and costs: everything that has a recipe recomputed, against the plain program.

``python -m benchmarks.recompute --workload reference_gpt --rounds 3``

Alternates, in one process, the plain program with one in which all that can be recomputed cheaply is, and all else
stays. Prints step times and peaks, and which operations had recipes and which had not, by bytes of what they made.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

import torch_tiers as tiers
from benchmarks import workloads
from benchmarks.activation_path import Sitting, run_variant, table
from benchmarks.settling import PLANNING, plans
from torch_tiers.allocator.sizes import GiB
from torch_tiers.migrator.hooks import saver as hooks
from torch_tiers.migrator.links import Links
from torch_tiers.migrator.plan import Plan
from torch_tiers.migrator.planner.build import make_plan
from torch_tiers.migrator.planner.effects import obtainable
from torch_tiers.migrator.policies import POLICIES
from torch_tiers.migrator.recompute.finder import base_of
from torch_tiers.migrator.runtime import devices
from torch_tiers.migrator.timing import product_in
from torch_tiers.migrator.trace import Trace


def light(trace: Trace, budget: int, links: Links) -> Plan:
    """Recompute what is cheap to, and keep the rest, whatever the budget."""
    cheap = {ident for ident, recipe in trace.recipes.items() if product_in(recipe.op) is None}
    dropped = obtainable(trace, cheap)
    return make_plan("light", trace, (), max(budget, trace.saved_bytes), dropped=dropped)


@contextmanager
def light_everywhere() -> Iterator[None]:
    """Have the policy ``move`` mean `light`."""
    with mock.patch.object(devices, "POLICIES", {**POLICIES, "move": light}):
        yield


def found_by_operation(step: Callable[[], torch.Tensor], arguments: dict[str, str]) -> None:
    """Print, by operation, the bytes that have recipes and those that have none, and what the recipes take."""
    operations: dict[int, str] = {}

    def note(tensor: torch.Tensor, packed: Any, key: str) -> None:
        record = packed[3] if isinstance(packed, tuple) else packed.record
        if record is not None and record.known is not None:
            node: Any = base_of(tensor).grad_fn
            operations[record.known.ident] = "(not differentiable)" if node is None else node.name()
        hooks_note(tensor, packed, key)

    hooks_note = hooks.note
    with (
        mock.patch.object(hooks, "note", note),
        tiers.session(**{"allocator": "torch", **arguments, "policy": "auto"}) as session,
    ):
        for _ in range(8):  # some are recorded
            step()
        patience = time.monotonic() + PLANNING  # what was recorded tells without a plan, too
        while plans(session).coming and time.monotonic() < patience:  # beside the program, which would be in the way
            time.sleep(0.02)
        step()
        saver = session.runtime.saver()
        assert saver is not None
        (trace,) = (mover.learner.traces[-1] for mover in saver.armed_movers if mover.learner.traces)
    found: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for life in trace.lifetimes:
        recipe = trace.recipes.get(life.ident)
        row = found[operations.get(life.ident, "?")]
        row[recipe is None] += life.nbytes
        row[2] += recipe.seconds if recipe else 0.0
    print(f"{'operation':<28}{'recipes GiB':>12}{'without GiB':>12}{'ms':>8}")
    for operation, (nbytes, without, seconds) in sorted(found.items(), key=lambda row: -row[1][0] - row[1][1]):
        print(f"{operation:<28}{nbytes / GiB:>12.3f}{without / GiB:>12.3f}{seconds * 1e3:>8.2f}")
    total = sum(recipe.seconds for recipe in trace.recipes.values())
    print(f"period {trace.seconds * 1e3:.1f} ms, recipes {total * 1e3:.1f} ms, saved {trace.saved_bytes / GiB:.2f} GiB")
    print(f"most HBM beside saved storages: {max(trace.others, default=0) / GiB:.2f} GiB")
    regions = sorted(trace.regions, key=lambda region: -region.seconds)[:8]
    for region in regions:
        print(f"region {region.path}: {region.seconds * 1e3:.2f} ms, inputs {region.input_bytes / GiB:.3f} GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workload", default="reference_gpt", choices=["reference_gpt", "long_context_gpt", "resnet152"]
    )
    parser.add_argument("--tiny", action="store_true", help="the small variant, on a CPU")
    parser.add_argument("--dram", default="32GiB", help="for the periods that are learned from")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    workload = getattr(workloads, options.workload)(device, tiny=options.tiny)
    arguments = {"dram": options.dram}
    found_by_operation(workload.step, arguments)
    sittings: list[Sitting] = []
    variants: dict[str, dict[str, str] | None] = {"plain": None, "light": {**arguments, "policy": "move"}}
    for number in range(options.rounds):
        names = list(variants) if number % 2 == 0 else list(variants)[::-1]
        for name in names:
            with light_everywhere():
                sittings.append(run_variant(name, workload.step, options.steps, variants[name]))
            print(f"round {number} {name}: {sittings[-1].step * 1e3:.1f} ms", flush=True)
    print(table(sittings))


if __name__ == "__main__":
    main()
