"""A workload with its blocks compiled."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from benchmarks.workloads import Workload

GRAPHS = 64  # of one compiled function: the blocks of a ResNet have several shapes


def compiled(workload: Workload, share: float, stack: ExitStack) -> Workload:
    """Have each block compiled on its own, to save `share` of its activations, until `stack` is left."""
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch

    torch.compiler.reset()
    stack.callback(torch.compiler.reset)
    stack.enter_context(dynamo.patch(recompile_limit=GRAPHS))
    stack.enter_context(functorch.patch(activation_memory_budget=share))
    for block in workload.model.get_submodule("blocks").children():
        block.compile(dynamic=False)
    return workload
