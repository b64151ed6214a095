"""Train a byte-level GPT on the source files of Python's standard library: ``python examples/train_gpt.py``.

Plain PyTorch. Losses are printed with every digit, so that two runs can be compared bit by bit.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Preset:
    blocks: int
    width: int
    heads: int
    batch: int
    length: int


PRESETS = {
    "laptop": Preset(blocks=4, width=128, heads=4, batch=8, length=256),
    "small": Preset(blocks=12, width=768, heads=12, batch=16, length=1024),
    "medium": Preset(blocks=24, width=1024, heads=16, batch=16, length=1024),
    "1.3b": Preset(blocks=24, width=2048, heads=16, batch=8, length=2048),
}


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gelu = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.contract(self.gelu(self.expand(self.norm2(x))))


class GPT(nn.Module):
    """A GPT with learned positions and an output layer of its own; returns logits."""

    def __init__(self, blocks: int, width: int, heads: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.empty(length, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Layers that end in the residual stream start smaller, so that depth does not make it grow.
                residual = name.endswith(("proj.weight", "contract.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * blocks) ** 0.5 if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def standard_library(limit: int = 4 << 20) -> Tensor:
    """Return the first `limit` bytes of the standard library's modules, in the order of their names."""
    text = b"\n".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    return torch.frombuffer(bytearray(text[:limit]), dtype=torch.uint8)


def peak_memory(device: torch.device) -> str:
    if device.type == "cuda":
        allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        return f"{allocated / 2**30:.2f} GiB allocated {reserved / 2**30:.2f} GiB reserved"
    unit = 1 if sys.platform == "darwin" else 1024
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30:.2f} GiB resident"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT on the standard library's sources.")
    parser.add_argument("--preset", choices=PRESETS, default="laptop")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, help="sequences in a step (default: the preset's)")
    parser.add_argument("--seq", type=int, help="bytes in a sequence (default: the preset's)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ... (default: auto)")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deterministic", action="store_true", help="use deterministic kernels only")
    return parser.parse_args()


def main() -> None:
    arguments, cuda = parse_arguments(), torch.cuda.is_available()
    preset = PRESETS[arguments.preset]
    batch, length = arguments.batch or preset.batch, arguments.seq or preset.length
    device = torch.device(("cuda" if cuda else "cpu") if arguments.device == "auto" else arguments.device)
    automatic = "bfloat16" if device.type == "cuda" else "float32"
    torch.set_default_dtype(getattr(torch, automatic if arguments.dtype == "auto" else arguments.dtype))
    torch.manual_seed(arguments.seed)
    if arguments.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)

    text = standard_library()
    with device:
        model = GPT(preset.blocks, preset.width, preset.heads, length, vocabulary=256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    generator = torch.Generator().manual_seed(arguments.seed)

    for step in range(arguments.steps):
        started = time.perf_counter()
        starts = torch.randint(len(text) - length, (batch,), generator=generator).tolist()
        sequences = torch.stack([text[start : start + length + 1] for start in starts]).to(device).long()
        logits = model(sequences[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), sequences[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        value = loss.item()
        print(f"step {step} loss {value!r} time {(time.perf_counter() - started) * 1e3:.1f} ms", flush=True)
    print(f"peak memory {peak_memory(device)}")


if __name__ == "__main__":
    main()
