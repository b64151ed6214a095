"""The benchmark workloads are what reports say they are, and repeat bit by bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.workloads import (
    Workload,
    changing_gpt,
    checkpointed_gpt,
    long_context_gpt,
    reference_gpt,
    resnet152,
    unet,
)
from examples.train_gpt import GPT
from examples.train_resnet import LAYERS, ResNet

BUILDERS = (reference_gpt, long_context_gpt, checkpointed_gpt, changing_gpt, resnet152, unet)
every_workload = pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)


@every_workload
def test_the_same_seed_gives_the_same_losses(build: Callable[..., Workload]) -> None:
    first, second, other = build("cpu", tiny=True), build("cpu", tiny=True), build("cpu", tiny=True, seed=1)
    losses = [[workload.step().item() for _ in range(2)] for workload in (first, second, other)]
    assert losses[0] == losses[1] != losses[2]


@every_workload
def test_steps_train(build: Callable[..., Workload]) -> None:
    workload = build("cpu", tiny=True)
    losses = [workload.step().item() for _ in range(4)]
    assert losses[-1] < losses[0]


@every_workload
def test_a_step_leaves_no_gradients_and_returns_no_graph(build: Callable[..., Workload]) -> None:
    workload = build("cpu", tiny=True)
    assert not workload.step().requires_grad
    assert all(parameter.grad is None for parameter in workload.model.parameters())


@every_workload
def test_forward_and_backward_can_be_had_without_the_optimizer(build: Callable[..., Workload]) -> None:
    workload = build("cpu", tiny=True)
    before = [parameter.detach().clone() for parameter in workload.model.parameters()]
    assert workload.forward().requires_grad
    workload.forward_backward()
    for old, parameter in zip(before, workload.model.parameters(), strict=True):
        assert parameter.grad is not None and torch.equal(old, parameter)


def test_the_gpt_keeps_weights_gradients_and_state_in_bf16_and_its_loss_in_fp32() -> None:
    workload = reference_gpt("cpu", tiny=True)
    assert workload.forward_backward().dtype is torch.float32
    assert {parameter.grad.dtype for parameter in workload.model.parameters() if parameter.grad is not None} == {
        torch.bfloat16
    }
    workload.step()
    states = workload.optimizer.state.values()
    assert {state[key].dtype for state in states for key in ("exp_avg", "exp_avg_sq")} == {torch.bfloat16}


def test_building_a_workload_leaves_the_default_dtype_alone() -> None:
    reference_gpt("cpu", tiny=True)
    assert torch.get_default_dtype() is torch.float32


def test_the_resnet_computes_in_bf16_channels_last_with_fp32_weights() -> None:
    workload = resnet152("cpu", tiny=True)
    assert {parameter.dtype for parameter in workload.model.parameters()} == {torch.float32}
    seen: list[torch.Tensor] = []
    hook = workload.model.get_submodule("blocks.0").register_forward_hook(lambda *a: seen.append(a[2]))
    assert workload.step().dtype is torch.float32
    hook.remove()
    assert seen[0].dtype is torch.bfloat16
    assert seen[0].is_contiguous(memory_format=torch.channels_last)


def test_the_models_have_their_published_number_of_parameters() -> None:
    with torch.device("meta"):
        gpt = GPT(24, 2048, 16, 2048, vocabulary=32_000)
        resnets = {depth: ResNet(LAYERS[depth], bottleneck=depth >= 50) for depth in (18, 50, 152)}
    assert count(gpt) == 1_343_868_928
    assert {depth: count(model) for depth, model in resnets.items()} == {
        18: 11_689_512,
        50: 25_557_032,
        152: 60_192_808,
    }


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
