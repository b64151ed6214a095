"""Preferences: a policy and its frozen reference each read the chosen and the rejected answer, four forwards a step."""

# mypy: no-warn-return-any
from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.gpt import GPT
from benchmarks.zoo.program import Program, seeded


def log_likelihood(model: nn.Module, tokens: Tensor, answer: Tensor) -> Tensor:
    """Of the answers, which begin after the prompt."""
    logits = model(tokens[:, :-1]).float()
    each = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return (each * answer[:, 1:]).sum(-1)


def make(size: str, device: torch.device | str, checkpoint: bool = False) -> Program:
    device = torch.device(device)
    layers, width, heads, length, vocabulary, batch = (
        (20, 1024, 16, 1024, 32000, 10) if size == "full" else (2, 32, 2, 16, 100, 2)
    )
    generator = seeded(device)
    with device:
        policy = GPT(layers, width, heads, length, vocabulary, checkpoint).to(torch.bfloat16)
    reference = copy.deepcopy(policy).requires_grad_(False).eval()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5)

    def step() -> Tensor:
        chosen, rejected = (
            torch.randint(vocabulary, (batch, length + 1), device=device, generator=generator) for _ in range(2)
        )
        prompt = length // 4
        rejected[:, :prompt] = chosen[:, :prompt]
        answer = (torch.arange(length + 1, device=device) >= prompt).expand_as(chosen)
        with torch.no_grad():
            before = log_likelihood(reference, chosen, answer) - log_likelihood(reference, rejected, answer)
        now = log_likelihood(policy, chosen, answer) - log_likelihood(policy, rejected, answer)
        loss = -F.logsigmoid(0.1 * (now - before)).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Program((policy, reference), (optimizer,), step)
