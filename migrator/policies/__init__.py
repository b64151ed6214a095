"""Policies: pure functions from a trace, a budget and the links to a plan, a file each.

The budget is the HBM, in bytes, for the saved tensors and for what the trace calls `others`; where the
trace has no `others` it is the room for the saved tensors alone.

The same input gives the same plan, but for two that have a time limit: `autotm`, whose solver stops after some seconds,
and `swapadvisor`, if its generations are not over by then.

To add one: write ``migrator/policies/NAME.py`` with a function ``plan(trace, budget, links) -> Plan`` whose
docstring cites its source, enter it in `MODULES`, and give it a golden test in
``tests/unit/migrator/policies``. What policies share is in `migrator.planner`; its `schedule.fit` makes the plan of
a choice, and `migrator.simulator` tells what that takes. A file whose plans recompute says so with
``RECOMPUTES = True``: for others no operators are recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:  # the configuration reads the names inside `import torch`, and must load nothing for them
    from torch_tiers.migrator.model.links import Links
    from torch_tiers.migrator.model.plan import Plan
    from torch_tiers.migrator.model.trace import Trace

Policy: TypeAlias = Callable[["Trace", int, "Links"], "Plan"]

MODULES = {
    "auto": "auto",
    "autotm": "autotm",
    "capuchin": "capuchin",
    "checkpoint": "checkpoint",
    "flashneuron": "flashneuron",
    "g10": "g10",
    "keep": "keep",
    "move": "move",
    "sentinel": "sentinel",
    "ssdtrain": "ssdtrain",
    "superneurons": "superneurons",
    "swapadvisor": "swapadvisor",
    "teraio": "teraio",
    "vdnn++": "vdnnpp",
    "vdnn-all": "vdnn:plan_all",
    "vdnn-conv": "vdnn:plan_conv",
    "vdnn-dyn": "vdnn:plan_dyn",
}
"""The policies by name, and the file of each; its function, where that is not ``plan``."""


class _Policies(Mapping[str, Policy]):
    """Loads a policy when it is asked for: their names are known, and cost nothing, before."""

    def __getitem__(self, name: str) -> Policy:
        module, _, function = MODULES[name].partition(":")
        policy: Policy = getattr(import_module(f"{__name__}.{module}"), function or "plan")
        return policy

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)


POLICIES = _Policies()


def recomputes(name: str) -> bool:
    """Whether the plans of a policy may drop saved tensors, to have them made again."""
    return getattr(import_module(f"{__name__}.{MODULES[name].partition(':')[0]}"), "RECOMPUTES", False)
