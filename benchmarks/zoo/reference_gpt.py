"""The reference GPT of the other benchmarks, all in bf16, on the same batch in every step."""

from __future__ import annotations

import torch

from benchmarks import workloads
from benchmarks.zoo.program import Program


def make(size: str, device: torch.device | str, checkpoint: bool = False) -> Program:
    build = workloads.checkpointed_gpt if checkpoint else workloads.reference_gpt
    job = build(device, tiny=size == "cpu")
    return Program((job.model,), (job.optimizer,), job.step)
