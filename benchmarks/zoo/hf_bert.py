"""BERT of `transformers` with its Trainer, which fills in masked words of padded sentences: bf16 by autocast, AdamW."""

# mypy: no-warn-return-any
from __future__ import annotations

import torch

from benchmarks.zoo import trainer
from benchmarks.zoo.bert import sentences
from benchmarks.zoo.program import Program, package, seeded

NEEDS = trainer.NEEDS


def make(size: str, device: torch.device | str, checkpoint: bool = False) -> Program:
    hf, device = package("transformers"), torch.device(device)
    width, layers, heads, vocabulary, batch, length = (
        (1024, 24, 16, 30522, 32, 512) if size == "full" else (64, 2, 4, 128, 2, 16)
    )
    generator = seeded(device)
    config = hf.BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=length,
    )
    model = hf.BertForMaskedLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    words, real, labels = sentences(8 * batch, length, vocabulary, generator)
    columns = {"input_ids": words, "attention_mask": real.long(), "labels": labels}
    examples = [{name: column[k] for name, column in columns.items()} for k in range(len(words))]
    how = {"bf16": True, "gradient_checkpointing": checkpoint}
    return trainer.trained(model, optimizer, examples, batch, **how)
