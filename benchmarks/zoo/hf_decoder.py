"""A Llama of `transformers` in bf16 with its Trainer: gradients of two batches are added up, a warm-up, clipping."""

# mypy: no-warn-return-any
from __future__ import annotations

import torch

from benchmarks.zoo import trainer
from benchmarks.zoo.program import Program, package, seeded

NEEDS = trainer.NEEDS


def make(size: str, device: torch.device | str, checkpoint: bool = False) -> Program:
    hf, device = package("transformers"), torch.device(device)
    width, layers, heads, vocabulary, batch, length = (
        (2048, 16, 16, 32000, 6, 1024) if size == "full" else (64, 2, 4, 128, 1, 16)
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
    model = hf.LlamaForCausalLM(config).to(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
    tokens = torch.randint(vocabulary, (16 * batch, length), device=device, generator=generator)
    examples = [{"input_ids": row, "labels": row} for row in tokens]
    how = {"bf16": device.type == "cuda", "gradient_accumulation_steps": 2, "gradient_checkpointing": checkpoint}
    return trainer.trained(model, optimizer, examples, batch, **how)
