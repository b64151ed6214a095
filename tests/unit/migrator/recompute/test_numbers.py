"""Random numbers go on from where they stood, whoever draws them and however NumPy keeps them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from torch_tiers.migrator.recompute import numbers
from torch_tiers.migrator.recompute.numbers import Numbers


@pytest.fixture(autouse=True)
def same_numbers_after() -> Iterator[None]:
    python, of_numpy = random.getstate(), np.random.get_state()
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    yield
    np.random.set_bit_generator(generator)  # type: ignore[attr-defined]
    random.setstate(python)
    np.random.set_state(of_numpy)


def drawn() -> list[float]:
    return [random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn())]


def assert_goes_on(draw: Callable[[], Any], *generators: Any) -> None:
    """Check that what is drawn again is what was drawn, and what comes after that as if it had not been."""
    stood = Numbers(generators)
    first, later = draw(), draw()
    stood.go_on()
    assert draw() == first
    with stood.again():
        assert draw() == first
        assert draw() == later
    assert draw() == later


def test_numbers_of_python_and_of_numpy_go_on() -> None:
    random.seed(0)
    np.random.seed(0)
    for before in range(4):  # draws, after which another half of two normal numbers is kept, or not
        for _ in range(before):
            drawn()
        assert_goes_on(drawn)


def test_the_second_of_two_normal_numbers_is_drawn_again() -> None:
    """It is kept apart from the generator's words, which are the same before and after it is drawn."""
    np.random.seed(0)
    np.random.randn()
    assert_goes_on(lambda: float(np.random.randn()))
    np.random.seed(1)
    first = Numbers()
    np.random.randn()
    half = Numbers()
    second = np.random.randn()
    for stood in (first, half, first, half):
        stood.go_on()
    assert np.random.randn() == second


def test_more_numbers_than_the_key_has_words_go_on() -> None:
    np.random.seed(0)
    assert_goes_on(lambda: np.random.rand(1000).tolist())


def test_another_generator_that_the_program_has_set_goes_on() -> None:
    np.random.set_bit_generator(np.random.PCG64(0))  # type: ignore[attr-defined]
    assert_goes_on(drawn)


def test_generators_of_the_program_s_own_go_on() -> None:
    ours = torch.Generator().manual_seed(0), random.Random(0), np.random.default_rng(0)
    assert_goes_on(lambda: [float(torch.rand((), generator=ours[0])), ours[1].random(), float(ours[2].random())], *ours)


def test_numpy_is_asked_and_told_only_where_numbers_were_drawn() -> None:
    np.random.seed(0)
    stood = Numbers()
    with (
        mock.patch.object(np.random, "get_state", wraps=np.random.get_state) as get_state,
        mock.patch.object(np.random, "set_state", wraps=np.random.set_state) as set_state,
    ):
        for _ in range(10):
            again = Numbers()
            with again.again():
                pass
            stood.go_on()
        assert not get_state.called and not set_state.called
        with stood.again():
            np.random.rand()
        assert not get_state.called and set_state.call_count == 1
        np.random.rand()
        Numbers()
        assert get_state.call_count == 1


def test_words_that_do_not_tell_what_numpy_says_are_not_gone_by() -> None:
    """Of a NumPy that lays its generator out in another way; or another thread drew while NumPy was asked."""
    np.random.seed(0)
    with mock.patch.object(numbers, "_words", return_value=bytes(2500)):
        assert_goes_on(drawn)
