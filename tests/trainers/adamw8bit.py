"""Plain PyTorch with an optimizer of bitsandbytes that keeps its state in 8 bits."""

from __future__ import annotations

import bitsandbytes as bnb

from tests.trainers.small import llama, train


def main() -> None:
    model = llama()
    train(model, bnb.optim.AdamW8bit(model.parameters(), lr=1e-3))


if __name__ == "__main__":
    main()
