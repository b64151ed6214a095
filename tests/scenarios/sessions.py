"""`with tiers.session(...)`: one after the other, never nested, and nothing left of us afterwards."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizers

import torch_tiers as tiers
from tests.scenarios import batch, bits, gradients, main, moved, moving, perceptron, train
from torch_tiers.allocator.errors import TiersError
from torch_tiers.allocator.sizes import MiB


def _footprint() -> dict[str, object]:
    """Return what a session may leave behind, as far as it can be counted."""
    gc.collect()
    return {
        "a module's call": nn.Module.__call__,
        "optimizer hooks": len(optimizers._global_optimizer_post_hooks),
        "saved-tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "torch.func's switch": torch._C._autograd._saved_tensors_hooks_disable,
        "statistics' reset": torch.cuda.reset_peak_memory_stats,
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "files": len(os.listdir("/proc/self/fd")),
    }


def one_after_the_other_with_nothing_left(device: torch.device) -> None:
    plain = bits(train(perceptron(device), device))
    with tempfile.TemporaryDirectory() as directory:
        arguments = {"dram": "8MiB", "nvme": "64MiB", "nvme_path": directory, "nvme_gds": "off"}
        with moving(room=0, **arguments):  # warms up: what PyTorch itself starts at first use
            train(perceptron(device), device)
        before = _footprint()
        for _ in range(3):
            with moving(room=0, **arguments) as session:
                assert bits(train(perceptron(device), device)) == plain
                assert moved(session)["h2d"] > 0
            assert _footprint() == before
            assert os.listdir(directory) == []
    print(f"  {before}")
    assert bits(train(perceptron(device), device)) == plain


def left_by_an_exception(device: torch.device) -> None:
    with moving():
        train(perceptron(device), device)
    before = _footprint()
    with pytest.raises(ArithmeticError), moving(room=0):
        model = perceptron(device)
        train(model, device, steps=2)
        loss = model(batch(device, 0)).sum()
        raise ArithmeticError(loss.shape)
    assert _footprint() == before


def never_nested(device: torch.device) -> None:
    with moving(room=0) as session:
        train(perceptron(device), device, steps=2)
        with pytest.raises(TiersError, match="already"), tiers.session(policy="keep"):
            pass
        before = moved(session)["h2d"]
        train(perceptron(device), device, steps=2)
        assert moved(session)["h2d"] > before


def the_same_object_twice(device: torch.device) -> None:
    """Refused or right, but never half: the second `with` leaves nothing either."""
    with moving():
        train(perceptron(device), device)
    before = _footprint()
    again = tiers.session(policy="move", dram="64MiB")
    with again:
        train(perceptron(device), device)
    try:
        with again:
            train(perceptron(device), device)
    except (RuntimeError, TiersError) as refusal:
        print(f"  {refusal}")
    assert _footprint() == before


def backward_after_the_session(device: torch.device) -> None:
    """A loss made inside, its backward outside: nothing hangs, and the gradients are right."""

    def results(within: Callable[[], object]) -> list[bytes]:
        model = perceptron(device)
        with within():
            train(model, device, steps=3)
            model.zero_grad()
            loss = model(batch(device, 9)).square().mean()
        loss.backward()
        return bits(gradients(model))

    plain = results(torch.enable_grad)
    for room in (0, MiB, 64 * MiB):
        assert results(lambda room=room: moving(room=room)) == plain


def a_session_in_which_nothing_trains(device: torch.device) -> None:
    before = _footprint()
    with moving(), torch.no_grad():
        perceptron(device)(batch(device, 0))
    with moving():
        pass
    assert _footprint() == before


def peak_statistics_are_the_program_s(device: torch.device) -> None:
    """We look at peaks of iterations; a program that reads or resets its own does not notice."""
    if device.type == "cpu":
        return  # PyTorch counts no memory there
    with moving(room=0):
        model = perceptron(device)
        torch.cuda.reset_peak_memory_stats()
        peaks = []
        for i in range(6):
            train(model, device, steps=1)
            model(batch(device, i, rows=4096 * (6 - i))).sum().backward()  # needs less than the one before
            peaks.append(torch.cuda.max_memory_allocated())
        print(f"  {peaks}")
        assert peaks == sorted(peaks)
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() < peaks[-1]


if __name__ == "__main__":
    main("sessions")
