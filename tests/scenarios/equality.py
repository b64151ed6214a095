"""The programs of tests/programs, bit for bit what they are without tiers, at every budget; some under every policy.

``python -m tests.scenarios.equality [PROGRAM ...] [--device cuda]``
"""

from __future__ import annotations

import argparse
import tempfile
from functools import cache
from importlib.util import find_spec
from typing import Any

from tests.programs import PROGRAMS, run
from tests.scenarios import REMADE, moving
from torch_tiers.allocator.sizes import MiB
from torch_tiers.migrator.model.links import Links
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.policies import POLICIES

STEPS = {"cpu": 10, "cuda": 20}
"""On a CPU plans are in force from the third step on."""
DISK = {"nvme": "256MiB", "nvme_gds": "off"}
BUDGETS: dict[str, dict[str, Any]] = {
    "everything moves, nothing is brought ahead": {"room": 0, "dram": "256MiB"},
    "everything moves": {"room": 4 * MiB},
    "two thirds move": {"share": 2 / 3},
    "a third moves": {"share": 1 / 3},
    "nothing moves": {"policy": "keep"},
    "all that can be is recomputed": REMADE,
    "all that can be is recomputed, and everything else moves": {"recompute": True},
    "all that can be is recomputed, two thirds of the rest move, at the plan's pace": {
        "recompute": True,
        "paced": True,
        "share": 2 / 3,
    },
    "everything moves, to disk as well": {"dram": "8MiB", **DISK},
    "a third moves, to disk as well": {"dram": "8MiB", "share": 1 / 3, **DISK},
}

PLANNED = ("cnn_bn", "transformer_tied")
"""Programs that run under every policy."""

STAYS = 0.6  # of what is saved, as far as the budget goes that policies are given


@cache
def plain(program: str, device: str) -> tuple[list[str], dict[str, list[str]]]:
    """Return the results of a program without tiers, which has been shown to equal itself."""
    results = run(program, STEPS[device], device)
    assert run(program, STEPS[device], device) == results, "the program does not equal itself"
    return results


def check(program: str, budget: str, device: str) -> None:
    """Check that losses and every gradient of `STEPS` are those of the program without tiers."""
    expected = plain(program, device)
    with (
        tempfile.TemporaryDirectory() as directory,
        moving(**{"nvme_path": directory, **BUDGETS[budget]}) as session,
    ):
        assert run(program, STEPS[device], device) == expected
        stats = session.stats()
    sizes = {lane: f"{nbytes / MiB:.1f} MiB" for lane, nbytes in stats["moved"].items()}
    print(f"{program}, {budget}: {sizes}, {stats['groups']} groups, {stats['iterations']} iterations")


def check_policy(program: str, policy: str, device: str) -> None:
    """The same under the plans of a policy, for a budget that does not hold all that is saved."""
    expected, made = plain(program, device), list[Plan]()

    def within_less(trace: Trace, budget: int, links: Links) -> Plan:
        made.append(POLICIES[policy](trace, max(trace.others) + int(STAYS * trace.saved_bytes), links))
        return made[-1]

    with moving(plan=within_less) as session:
        assert run(program, STEPS[device], device) == expected
        saver = session.runtime.saver()
        assert saver is not None
        carried_out = [plan for mover in saver.movers.armed for plan in mover.learner.plans]
    assert carried_out and all(plan in made for plan in carried_out)
    recomputed = sum(len(plan.recompute) for plan in carried_out)
    print(f"{program}, {policy}: {session.stats()['moved']}, {recomputed} recomputed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.scenarios.equality")
    parser.add_argument("programs", nargs="*", default=PROGRAMS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    for program in arguments.programs:
        for budget in BUDGETS:
            check(program, budget, arguments.device)
        for policy in POLICIES if program in PLANNED else ():
            if policy != "autotm" or find_spec("scipy") is not None:
                check_policy(program, policy, arguments.device)
