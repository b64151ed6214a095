"""A Llama of `transformers`, trained in bf16: accumulated gradients, a schedule, loss averaged over the parts."""

# mypy: no-warn-return-any
from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.zoo.program import Program, enable_checkpointing, seeded, transformers

ACCUMULATED = 2


def make(size: str, device: torch.device | str, checkpoint: bool = False) -> Program:
    hf, device = transformers(), torch.device(device)
    width, layers, heads, vocabulary, batch, length = (
        (1024, 20, 16, 32000, 10, 1024) if size == "full" else (64, 2, 4, 128, 1, 16)
    )
    generator = seeded(device)
    config = hf.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=length,
        use_cache=False,
    )
    model = hf.LlamaForCausalLM(config).to(device, torch.bfloat16).train()
    if checkpoint:
        enable_checkpointing(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))

    def step() -> Tensor:
        total = torch.zeros((), device=device)
        for _ in range(ACCUMULATED):
            tokens = torch.randint(vocabulary, (batch, length), device=device, generator=generator)
            loss: Tensor = model(input_ids=tokens, labels=tokens).loss / ACCUMULATED
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return Program((model,), (optimizer,), step)
