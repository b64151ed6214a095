"""Policies: pure functions from a trace, a budget and the links to a plan, a file each.

The budget is the HBM, in bytes, for the saved tensors and for what the trace calls `others`; where the
trace has no `others` it is the room for the saved tensors alone.

To add one: write ``migrator/policies/NAME.py`` with a function ``plan(trace, budget, links) -> Plan`` whose
docstring cites its source, enter it in `POLICIES`, and give it a golden test in
``tests/unit/test_policies.py``. What policies share: `migrator.intervals` (when storages lie idle),
`migrator.booking` (lanes and memory over time), `migrator.plan.make_plan`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from migrator.links import Links
from migrator.plan import Plan
from migrator.policies import auto, flashneuron, keep, move
from migrator.trace import Trace

Policy = Callable[[Trace, int, Links], Plan]

POLICIES: MappingProxyType[str, Policy] = MappingProxyType(
    {
        "auto": auto.plan,
        "flashneuron": flashneuron.plan,
        "keep": keep.plan,
        "move": move.plan,
    }
)

AUTO = "flashneuron"
"""What ``policy = "auto"`` means in this release: the best that is built so far."""
