"""Every program of tests/programs equals itself: what the equality tests of the runtime stand on."""

from __future__ import annotations

import math

import pytest

from tests.programs import PROGRAMS, run


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_equals_itself_bitwise(program: str) -> None:
    assert run(program, 2, "cpu") == run(program, 2, "cpu")


@pytest.mark.parametrize("program", PROGRAMS)
def test_losses_are_finite_and_change_from_step_to_step(program: str) -> None:
    losses, gradients = run(program, 2, "cpu")
    assert all(math.isfinite(float.fromhex(loss)) for loss in losses)
    assert losses[0] != losses[1]
    assert all(len(digests) == 2 for digests in gradients.values())


def test_another_seed_gives_another_run() -> None:
    assert run("accumulate", 1, "cpu", seed=1) != run("accumulate", 1, "cpu", seed=2)


def test_the_mixture_leaves_parameters_without_a_gradient_and_feeds_an_expert_nothing() -> None:
    _, gradients = run("moe", 1, "cpu")
    assert gradients["layers.0.dropped.0.weight"] == ["none"]
    assert gradients["layers.0.experts.3.0.weight"] != ["none"]
