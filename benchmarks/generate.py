"""How fast does a model generate whose weights take more than the budget, beside the speed of the link?

``python -m benchmarks.generate --hbm 6GiB`` runs a decoder of 6.7e9 weights in bf16, plain and under tiers, a process
each that take turns. Each token is a forward, for which each weight that lies in DRAM crosses the link once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

PROMPT, TOKENS, WARMUP = 64, 16, 4
FULL = (32, 4096, 32, 11008, PROMPT, 32000)
SMALL = (4, 64, 2, 128, PROMPT, 100)


def generate(size: str, device: str) -> dict[str, Any]:
    """Generate `TOKENS` tokens after a prompt, without a cache of keys; seconds a token, and the tokens."""
    import torch

    from benchmarks.zoo.lora import Decoder

    torch.manual_seed(0)
    with torch.device(device):
        model = Decoder(*(FULL if size == "full" else SMALL)).eval()
        tokens = torch.randint(100, (1, PROMPT))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    seconds = []
    with torch.inference_mode():
        for _ in range(WARMUP + TOKENS):
            began = time.perf_counter()
            x = model(tokens)
            following = model.head(x[:, -1]).argmax(-1, keepdim=True)
            tokens = torch.cat((tokens[:, 1:], following), dim=1)
            following.tolist()  # waits for the device
            seconds.append(time.perf_counter() - began)
    return {
        "seconds": statistics.median(seconds[WARMUP:]),
        "weights": weights,
        "tokens": tokens.tolist(),
        "demoted": demoted(),
    }


def demoted() -> int:
    """Bytes of weights that lie in DRAM, where tiers is on."""
    from torch_tiers.session import current

    session = current()
    return 0 if session is None else int(session.stats()["demoted"])


def run(size: str, device: str, environ: dict[str, str]) -> dict[str, Any]:
    """Generate in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.generate", "--worker", "--size", size, "--device", device]
    others = {name: value for name, value in os.environ.items() if not name.startswith("TIERS_")}
    done = subprocess.run(command, env={**others, **environ}, stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main(arguments: list[str] | None = None) -> None:
    """Print a line for each round."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generate", description=__doc__)
    parser.add_argument("--hbm", default="6GiB")
    parser.add_argument("--allocator", default="pages", choices=("pages", "torch"))
    parser.add_argument("--size", default="full", choices=("full", "small"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker:
        print(json.dumps(generate(given.size, given.device)))
        return
    for _ in range(given.rounds):
        plain = run(given.size, given.device, {})
        tiers = run(given.size, given.device, {"TIERS_ALLOCATOR": given.allocator, "TIERS_HBM": given.hbm})
        same = "the same" if plain["tokens"] == tiers["tokens"] else "OTHER"
        print(
            f"plain {plain['seconds'] * 1e3:.1f} ms a token, in {given.hbm} {tiers['seconds'] * 1e3:.1f} ms, {same} "
            f"tokens; {plain['weights'] / 1e9:.2f} GB of weights, of which {tiers['demoted'] / 1e9:.2f} GB in dram: "
            f"{tiers['demoted'] / tiers['seconds'] / 1e9:.1f} GB/s"
        )


if __name__ == "__main__":
    main()
