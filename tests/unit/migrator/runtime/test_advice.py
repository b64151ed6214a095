"""What the monitor is told at the end of an iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from unittest import mock

import torch

from tests.scenarios import moving, perceptron, train
from torch_tiers import assembly
from torch_tiers.migrator.runtime.backoff import Response
from torch_tiers.migrator.telemetry.now import Now
from torch_tiers.migrator.telemetry.transfers import Transfer

STEPS = 6


class Listener:
    watch = SimpleNamespace(summary=dict)

    def __init__(self) -> None:
        self.told: list[Now] = []

    def iteration_over(self, transfers: Sequence[Transfer], moved: Mapping[str, int], now: Now) -> Response:
        self.told.append(now)
        return Response()

    def close(self) -> None:
        pass


def test_an_iteration_tells_what_the_run_comes_to_in_plain_numbers() -> None:
    listener, cpu = Listener(), torch.device("cpu")
    with (
        mock.patch.object(assembly, "build_monitor", lambda *_: listener),
        moving(room=0) as session,
    ):
        train(perceptron(cpu), cpu, steps=STEPS)
        shown, stats = session._shown(), session.stats()
    first, last = listener.told[0], listener.told[STEPS - 1]
    assert (first.hbm, first.ideal_s, first.step_s) == (0, None, None)
    assert 0 < last.hbm <= stats["peak"]["hbm"]
    assert last.hbm_budget == stats["budget"]["hbm"] > 0
    assert last.iterations == STEPS
    assert STEPS - 1 <= last.steps <= STEPS
    assert last.step_s is not None and last.step_s > 0
    assert last.ideal_s is not None and last.predicted_s is not None
    assert 0 < last.ideal_s <= last.predicted_s
    assert shown["dram_budget"] == stats["budget"]["dram"]
    assert 0 <= shown["dram"] <= stats["peak"]["dram"]
    assert shown["rank"] is None
