"""Policies: pure functions from a trace and the room in HBM to a plan, a file each.

To add one: write ``migrator/policies/NAME.py`` with a function ``plan(trace, room) -> Plan`` whose
docstring cites its source, enter it in `POLICIES`, and give it a golden test in
``tests/unit/test_policies.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from migrator.plan import Plan
from migrator.policies import flashneuron, keep, move
from migrator.trace import Trace

Policy = Callable[[Trace, int], Plan]

POLICIES: MappingProxyType[str, Policy] = MappingProxyType(
    {
        "flashneuron": flashneuron.plan,
        "keep": keep.plan,
        "move": move.plan,
    }
)

AUTO = "flashneuron"
"""What ``policy = "auto"`` means in this release: the best that is built so far."""
