"""vDNN++ (Shriram et al., IPDPS'19): what vDNN offloads, without waiting for it.

The next layer starts before the last one's offload has ended, whose memory is released when it has (against vDNN's
"delayed computation start"); so the plan has vDNN's choice and prefetches, but all the room there is. The paper's other
parts are no decisions of a plan here: memory comes from PyTorch's caching allocator instead of a placement against
fragmentation, and pinned host memory is not compressed.
"""

from __future__ import annotations

from torch_tiers.migrator.model.links import Links
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.planner.decisions import assemble
from torch_tiers.migrator.policies import vdnn


def plan(trace: Trace, budget: int, links: Links) -> Plan:
    """Offload asynchronously what the first of vDNN's choices needs that fits the budget."""
    return assemble("vdnn++", trace, budget, vdnn.least(trace, budget, links))
