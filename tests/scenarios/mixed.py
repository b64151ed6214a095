"""Mixed precision: autocast, its cache of cast weights, GradScaler with steps that are skipped."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.scenarios import assert_same, batch, gradients, main, perceptron, train

ROWS = 1024  # few: a CPU may have to emulate bfloat16


def autocast_around_forward(device: torch.device) -> None:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return model(x[:ROWS]).float().square().mean()

    assert_same(lambda device: train(perceptron(device, depth=8), device, loss_of=loss_of), device)


def autocast_with_a_layer_in_full_precision(device: torch.device) -> None:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            h = model[:6](x[:ROWS])
            with torch.autocast(device.type, enabled=False):
                h = model[6:8](h.float())
            return model[8:](h).float().square().mean()

    assert_same(lambda device: train(perceptron(device, depth=8), device, loss_of=loss_of), device)


def a_grad_scaler_that_skips_steps(device: torch.device) -> None:
    """A batch with an infinity: the optimizer's step, by which we see a step's end, is not made."""

    def program(device: torch.device) -> list[Tensor]:
        model = perceptron(device, depth=8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
        results = []
        for i in range(6):
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.float16 if device.type == "cuda" else torch.bfloat16):
                loss = model(batch(device, i, rows=ROWS)).float().square().mean()
            if i % 3 == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            results += [loss.detach(), *gradients(model), torch.tensor(scaler.get_scale())]
        return results

    assert_same(program, device)


def weights_in_half_precision(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        model = perceptron(device, depth=8).bfloat16()
        return train(model, device, loss_of=lambda model, x: model(x[:ROWS].bfloat16()).float().square().mean())

    assert_same(program, device)


if __name__ == "__main__":
    main("mixed")
