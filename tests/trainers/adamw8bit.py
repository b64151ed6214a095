"""Plain PyTorch with an optimizer of bitsandbytes that keeps its state in 8 bits."""

from __future__ import annotations

import bitsandbytes as bnb
from torch import Tensor

from tests.trainers.small import STEPS, llama, tell, texts


def main() -> None:
    model = llama()
    optimizer = bnb.optim.AdamW8bit(model.parameters(), lr=1e-3)
    losses: list[Tensor] = []
    for tokens in texts(8 * STEPS).split(8):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    tell(losses, model.state_dict())


if __name__ == "__main__":
    main()
