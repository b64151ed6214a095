"""A Llama of `transformers` with random weights, texts of random words, and what a program prints of its training."""

# mypy: no-warn-return-any
from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

STEPS = 16
WORDS = 512
LENGTH = 128


def llama(width: int = 128, layers: int = 4) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def texts(count: int) -> Tensor:
    """Rows of words by their numbers, of which some stand in each row more often."""
    return torch.randint(3, WORDS // 4, (count, LENGTH), generator=torch.Generator().manual_seed(1))


def examples(count: int) -> list[dict[str, Tensor]]:
    return [{"input_ids": row, "labels": row} for row in texts(count)]


def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Train as plain PyTorch does, and tell."""
    losses: list[Tensor] = []
    for tokens in texts(8 * STEPS).split(8):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    tell(losses, model.state_dict())


def tell(losses: Iterable[Tensor | float], weights: Mapping[str, object]) -> None:
    """Print each loss as it is, bit for bit, and a hash of the weights."""
    for loss in losses:
        print(f"loss {float(loss).hex()}")
    digest = hashlib.sha256()
    for _, weight in sorted(weights.items()):
        for part in parts(weight):
            digest.update(part.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    print(f"weights {digest.hexdigest()}", flush=True)


def parts(weight: Any) -> list[Tensor]:
    """What a wrapper consists of, such as torchao's; a plain tensor of itself."""
    if hasattr(weight, "__tensor_flatten__"):
        return [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]
    return [weight] if isinstance(weight, Tensor) else []
