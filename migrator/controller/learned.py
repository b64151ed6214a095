"""What a run has learned of its program, for reports. Plain data."""

from __future__ import annotations

from typing import NamedTuple

from torch_tiers.migrator.controller.corrections import Corrections
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.trace import Trace


class Learned(NamedTuple):
    """A plan, the trace that it was made for, and what measurements have corrected."""

    trace: Trace
    plan: Plan
    corrections: Corrections
