"""A GPT whose blocks are sharded over two GPUs by fully_shard: fp32 shards, gathered in bf16 when they are needed."""

# mypy: no-warn-return-any
from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from benchmarks.zoo.gpt import GPT
from benchmarks.zoo.program import Program, join, seeded

RANKS = 2


def make(size: str, device: torch.device | str, checkpoint: bool = False) -> Program:
    rank, device = join(torch.device(device))
    layers, width, heads, length, vocabulary, batch = (
        (20, 1536, 12, 2048, 32000, 8) if size == "full" else (2, 32, 2, 16, 100, 2)
    )
    seeded(device)
    with device:
        model = GPT(layers, width, heads, length, vocabulary, checkpoint)
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.blocks:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator(device).manual_seed(1 + rank)

    def step() -> Tensor:
        tokens = torch.randint(vocabulary, (batch, length + 1), device=device, generator=generator)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Program((model,), (optimizer,), step)
