"""Both plain programs train, and the bound of a step is what it says."""

from __future__ import annotations

import pytest
import torch

from benchmarks.offloading import TIMED, Shape, bound, train

TINY = Shape(layers=2, width=64, batch=2, length=16, vocabulary=100)


def test_master_weights_train_as_fp32_weights_do() -> None:
    losses = [train(way, TINY, TIMED + 2, torch.device("cpu"))["loss"] for way in ("autocast", "masters")]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)


def test_a_forward_hides_what_crosses_the_link_beside_it() -> None:
    plain = {"seconds": 1.0, "forward": 0.25, "rate": 50e9}
    assert bound(plain, {"streamed": 10e9}) == pytest.approx(1.15)
    assert bound(plain, {"streamed": 50e9}) == pytest.approx(1.15 * 1.75)
