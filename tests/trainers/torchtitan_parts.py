"""Parts of torchtitan, whose trainer knows no CPU: its Llama 3, activation checkpointing, FSDP2, optimizers, losses.

A step is what its trainer makes of them, in one process of a group of gloo. Attention is PyTorch's own: torchtitan's is
compiled, and has no backward on a CPU.
"""

# mypy: no-warn-return-any
from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor, distributed

from tests.trainers.small import STEPS, tell

LENGTH, LAYERS = 256, 3
WORDS = 2048  # of its model for debugging

if find_spec("triton") is None:
    # torchtitan imports it for kernels of mixtures of experts, of which there are none here. PyTorch, which looks for
    # it, too, is asked first.
    import torch._inductor.compile_fx

    sys.modules |= {"triton": MagicMock(__spec__=ModuleSpec("triton", None)), "triton.language": MagicMock()}


def main(folder: str, checkpointing: str, loss: str) -> None:
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", torch.cpu  # it takes a GPU for granted
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as ranks
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry

    os.environ |= {"LOCAL_RANK": "0"}
    distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
    parallelism, training = ParallelismConfig(), TrainingConfig(mixed_precision_param="float32")
    dims = ParallelDims.from_config(parallelism, 1)
    spec = model_registry("debugmodel")
    del spec.model.layers[LAYERS:]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    ranks.set_spmd_backend(parallelism.spmd_backend)
    torch.manual_seed(0)
    with torch.device("meta"):
        model: Any = spec.model.build()
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config={"none": None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}[checkpointing],
        dump_folder=folder,
    )
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.train()
    whole = CrossEntropyLoss.Config()
    criterion: Any = (ChunkedLossWrapper.Config(loss_fn=whole) if loss == "chunked" else whole).build()
    if loss == "chunked":
        criterion.set_lm_head(model.lm_head)
        model._skip_lm_head = True
    optimizers = default_adamw(lr=8e-4).build(model_parts=[model])
    tokens = torch.randint(WORDS // 4, (STEPS, 4, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    losses: list[Tensor] = []
    context = ranks.get_spmd_context(parallel_dims=dims, spmd_typechecking=False)
    for batch in tokens:
        optimizers.zero_grad()
        labels = batch[:, 1:].contiguous()
        with context():
            found, _ = criterion(model(batch[:, :-1]), labels, torch.tensor(labels.numel()))
            found.backward()
        ranks.clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
        optimizers.step()
        losses.append(found.detach())
    tell(losses, {name: each.to_local() for name, each in model.state_dict().items()})
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
