"""A runtime that is told to back off, and to come back, computes the same; and lanes tell how long copies took."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from unittest import mock

import torch

from tests.scenarios import Program, assert_same, main, moving, perceptron, train
from torch_tiers import assembly
from torch_tiers.migrator.runtime.backoff import Response
from torch_tiers.migrator.streams import cuda as lanes_of_gpu
from torch_tiers.migrator.telemetry.now import Now
from torch_tiers.migrator.telemetry.transfers import Transfer

LEFT = {"d2h": 0.5, "h2d": 0.4, "bus": 0.4}


class _Fickle:
    """An advisor that changes its mind at every iteration, and remembers what it was told."""

    watch = SimpleNamespace(summary=dict)

    def __init__(self) -> None:
        self.transfers: list[list[Transfer]] = []

    def iteration_over(self, transfers: Sequence[Transfer], moved: Mapping[str, int], now: Now) -> Response:
        self.transfers.append(list(transfers))
        return (Response(), Response(2), Response(1, LEFT))[len(self.transfers) % 3]

    def close(self) -> None:
        pass


@contextmanager
def _advised() -> Iterator[_Fickle]:
    advisor = _Fickle()
    # By its name: `tiers.session` is the function, which hides the module.
    with mock.patch.object(assembly, "build_monitor", lambda *_: advisor):
        yield advisor


def _training(steps: int) -> Program:
    return lambda device: train(perceptron(device, depth=8), device, steps=steps)


def results_do_not_depend_on_advice(device: torch.device) -> None:
    with _advised() as advisor:
        assert_same(_training(12), device)
    assert len(advisor.transfers) > 10


def results_do_not_depend_on_advice_where_disk_is_used(device: torch.device) -> None:
    with _advised(), tempfile.TemporaryDirectory() as directory:
        assert_same(_training(12), device, room=0, dram="4MiB", nvme="64MiB", nvme_path=directory, nvme_gds="off")


def lanes_tell_how_long_copies_took(device: torch.device) -> None:
    # Else one copy in 64 MiB tells its time, which programs of this size take tens of steps to move.
    with _advised() as advisor, mock.patch.object(lanes_of_gpu, "TIMED_EVERY", 0), moving():
        train(perceptron(device, depth=8), device, steps=12)
        if device.type == "cuda":
            torch.cuda.synchronize()
    copies = [copy for iteration in advisor.transfers for copy in iteration]
    print(f"  {len(copies)} copies in {len(advisor.transfers)} iterations: {copies[-2:]}")
    for lane in ("d2h", "h2d"):
        times = [copy.end - copy.begin for copy in copies if copy.lane == lane]
        assert len(times) > 5
        assert all(0 < took < 10 for took in times)
    for iteration in advisor.transfers:
        # A lane carries out one copy after the other, so the times of one report must not overlap.
        for lane in ("d2h", "h2d"):
            ends = sorted((copy.begin, copy.end) for copy in iteration if copy.lane == lane)
            assert all(first[1] <= second[0] + 1e-4 for first, second in pairwise(ends))


def the_monitor_of_a_session_takes_part(device: torch.device) -> None:
    with moving() as session:
        train(perceptron(device, depth=8), device, steps=12)
        monitor = session.stats()["monitor"]
    assert "copies" in monitor["sensors"]


if __name__ == "__main__":
    main("monitor")
