"""Which weights are streamed, as models come, change, are interrupted and go."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import torch_tiers as tiers
from tests.scenarios import (
    assert_same_streamed,
    batch,
    bits,
    bytes_streamed,
    main,
    perceptron,
    step,
    streamed,
    train,
)
from torch_tiers.allocator.sizes import MiB
from torch_tiers.migrator.runtime import streamed_weights
from torch_tiers.migrator.weights.streamer import Streamer


def sees_weights_that_are_replaced_moved_and_loaded(device: torch.device) -> None:
    def program(device: torch.device) -> Sequence[Tensor]:
        model, results = perceptron(device), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        for i in range(8):
            results += step(model, device, i, optimizer)
            if i == 1:
                model.load_state_dict(kept)
            if i == 3:
                model.load_state_dict(kept, assign=True)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if i == 4:
                model[0].weight.data = model[0].weight.data.flip(0).contiguous()
            if i == 5:
                model.double().float()
            if i == 6:
                model[2] = nn.Linear(128, 128, device=device)
        return results

    assert_same_streamed(program, device)


def lets_go_of_a_model_that_is_gone(device: torch.device) -> None:
    with streamed(), tiers.session(allocator="torch", dram="64MiB"):
        model = perceptron(device)
        train(model, device, steps=2)
        weight = weakref.ref(model[0].weight)
        del model
        gc.collect()
        assert weight() is None


def goes_on_after_a_part_of_the_model_was_evaluated(device: torch.device) -> None:
    """The part has fewer weights, and gets no gradients then; the model still has all of them."""

    def program(device: torch.device) -> Sequence[Tensor]:
        model, results = perceptron(device, depth=6), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(6):
            results += step(model, device, i, optimizer)
            with torch.no_grad():
                results.append(model[0](batch(device, i)).clone())
        return results

    plain = bits(program(device))
    weights = sum(p.nbytes for p in perceptron(device, depth=6).parameters())
    with ExitStack() as stack:
        if device.type == "cpu":  # with gradients they do not fit; without, they would
            hbm = int(1.5 * weights)
        else:  # of whose memory libraries take more than that
            stack.enter_context(streamed())
            hbm = None
        session = stack.enter_context(tiers.session(allocator="torch", hbm=hbm, dram="64MiB", policy="keep"))
        assert bits(program(device)) == plain
        assert bytes_streamed(session) > 6 * weights


def chooses_again_after_an_interrupt(device: torch.device) -> None:
    model, interrupts = perceptron(device), [True]

    def open_(*given: Any) -> Streamer:
        if interrupts:
            interrupts.pop()
            raise KeyboardInterrupt
        return Streamer(*given)

    with (
        streamed(),
        mock.patch.object(streamed_weights, "Streamer", open_),
        tiers.session(allocator="torch", dram="64MiB") as session,
    ):
        try:
            model(batch(device, 0))
        except KeyboardInterrupt:
            train(model, device, steps=2)
        assert not interrupts and bytes_streamed(session) > 0


def has_room_for_the_largest_of_models_that_come_later(device: torch.device) -> None:
    with streamed(), tiers.session(allocator="torch", dram="64MiB") as session, torch.no_grad():
        small, large = nn.Linear(64, 64, device=device), nn.Linear(1024, 1024, device=device)
        small(torch.randn(8, 64, device=device))
        large(torch.randn(8, 1024, device=device))
        assert bytes_streamed(session) >= large.weight.nbytes


def sees_parameters_that_are_made_anew(device: torch.device) -> None:
    """On the memory that they had, as tools that convert models do; and elsewhere, while an optimizer has the old."""

    def program(device: torch.device) -> Sequence[Tensor]:
        model, results = perceptron(device, depth=4), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(9):
            results += step(model, device, i, optimizer)
            if i == 3:
                with torch.no_grad():
                    model[0].weight = nn.Parameter(model[0].weight.data)
            if i == 6:
                model[2].weight = nn.Parameter(model[2].weight.detach().clone() + 1)
        return results

    assert_same_streamed(program, device)


def copies_once_what_is_on_the_memory_of_another(device: torch.device) -> None:
    model = perceptron(device, depth=4).requires_grad_(False)
    with streamed(), tiers.session(allocator="torch", dram="64MiB") as session, torch.no_grad():
        read = []
        for i in range(8):
            before = bytes_streamed(session)
            model(batch(device, i))
            read.append(bytes_streamed(session) - before)
            if i == 3:
                for layer in model:
                    if isinstance(layer, nn.Linear):
                        layer.weight = nn.Parameter(layer.weight.data, requires_grad=False)
        assert read[7] == read[3], read


def has_frozen_weights_give_way_where_no_plan_fits(device: torch.device) -> None:
    """They alone would fit, and so would what a step needs besides; not both. Weights that train stay."""
    if device.type != "cpu":  # where pages are larger than these
        return
    for frozen in (True, False):

        def program(device: torch.device, *, frozen: bool = frozen) -> Sequence[Tensor]:
            model, results = perceptron(device, depth=24), []
            for layer in model[:-2]:
                layer.requires_grad_(not frozen)
            optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
            for i in range(16):
                results += step(model, device, i, optimizer)
            return results

        plain = bits(program(device))
        weights = sum(p.nbytes for p in perceptron(device, depth=24).parameters())
        hbm = weights + MiB if frozen else 2 * weights + MiB
        with tiers.session(allocator="torch", hbm=hbm, dram="256MiB") as session:
            assert bits(program(device)) == plain
            assert (bytes_streamed(session) > weights) is frozen


def ends_with_the_session(device: torch.device) -> None:
    """Afterwards operators read weights where they lie, and are not asked for them."""
    model = perceptron(device)
    with streamed(), tiers.session(allocator="torch", dram="64MiB") as session:
        train(model, device, steps=2)
        before = bytes_streamed(session)
        assert before > 0
    with torch.no_grad():
        model[0].weight.fill_(0)
        model[0].bias.fill_(0)
        assert not model[0](batch(device, 0)).any()
    assert bytes_streamed(session) == before


if __name__ == "__main__":
    main("streaming_choices")
