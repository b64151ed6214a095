"""What each method does to a workload."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.fractions.cells import Method
from benchmarks.workloads import Workload

Step = Callable[[], Tensor]
GRAPHS = 64  # of one compiled function: the blocks of a ResNet have several shapes


def prepare(method: Method, workload: Workload, stack: ExitStack, *, blocks: int | None, trl: Path | None) -> Step:
    """Make of a fresh workload what the method trains; its step. What has to be undone goes on `stack`.

    Parameters
    ----------
    blocks
        How many blocks ``checkpoint-k`` checkpoints.
    trl
        The file that has ``OffloadActivations``.
    """
    if method.compiled:
        workload = compiled(workload, method.activation_budget, stack, whole=method.compiled == "whole")
    if method.kind == "checkpoint":
        checkpoint_blocks(workload, None)
    elif method.kind == "checkpoint-k":
        checkpoint_blocks(workload, blocks)
    elif method.kind == "save_on_cpu":
        return replace(workload, forward=partial(_saved_on_cpu, workload.forward)).step
    elif method.kind == "trl":
        assert trl is not None
        return partial(_offloaded, workload, load_trl(trl).get_act_offloading_ctx_manager(workload.model))
    return workload.step


def blocks_of(workload: Workload) -> list[nn.Module]:
    """The blocks of its model, in the order of the forward."""
    return list(workload.model.get_submodule("blocks").children())


def checkpoint_blocks(workload: Workload, first: int | None) -> None:
    """Checkpoint the first blocks as wholes, all for None.

    The first: they are recomputed last, when the others have given their memory back.
    """
    for block in blocks_of(workload)[:first]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def _saved_on_cpu(forward: Step) -> Tensor:
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        return forward()


def _offloaded(workload: Workload, context: Any) -> Tensor:
    with context:  # around forward and backward, as TRL's trainer has it
        loss = workload.forward_backward()
    workload.optimizer.step()
    workload.optimizer.zero_grad(set_to_none=True)
    return loss


def compiled(workload: Workload, share: float, stack: ExitStack, *, whole: bool = False) -> Workload:
    """Have each block compiled, or forward and loss as a whole, to save `share` of its activations."""
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch

    torch.compiler.reset()
    stack.callback(torch.compiler.reset)
    stack.enter_context(dynamo.patch(recompile_limit=GRAPHS))
    stack.enter_context(functorch.patch(activation_memory_budget=share))
    if whole:
        return replace(workload, forward=torch.compile(workload.forward, dynamic=False))
    for block in blocks_of(workload):
        block.compile(dynamic=False)
    return workload


def load_trl(path: Path) -> ModuleType:
    """Load TRL's file of OffloadActivations without TRL: what it imports and is not there is stood in for."""
    stubs: dict[str, dict[str, Any]] = {
        "psutil": {"virtual_memory": lambda: SimpleNamespace(percent=0.0)},
        "accelerate": {},
        "accelerate.logging": {"get_logger": logging.getLogger},
        "accelerate.utils": {},
        "accelerate.utils.versions": {"is_torch_version": lambda operation, version: True},
        "transformers": {"is_torch_npu_available": lambda: False},
    }
    absent = {name for name in stubs if "." not in name and importlib.util.find_spec(name) is None}
    made = [name for name in stubs if name.partition(".")[0] in absent and name not in sys.modules]
    for name in made:
        module = ModuleType(name)
        vars(module).update(stubs[name])
        sys.modules[name] = module
    try:
        spec = importlib.util.spec_from_file_location("trl_activation_offloading", path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is no Python file")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        for name in made:
            del sys.modules[name]  # nobody else shall take them for the real ones
    return module
