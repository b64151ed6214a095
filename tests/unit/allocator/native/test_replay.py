"""Real allocation sequences through the core, without a GPU: from the second period on nothing is wasted.

The sequences are one training step each, taken from PyTorch's memory history on an H100; `events` are
requests and frees in order, `live_at_start` what lives as long as the program.
"""

from __future__ import annotations

import gzip
import json
import random
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.allocator.native.false_sharing import false_sharing_share
from tests.unit.one_core import OnOneCore
from torch_tiers.allocator.layout.packing import pack
from torch_tiers.allocator.layout.sequence import Log, predict
from torch_tiers.allocator.native import Core, Counts
from torch_tiers.allocator.sizes import PAGE, GiB, MiB, round_up

SEQUENCES = Path(__file__).parents[3] / "data" / "sequences"
PYTORCH = {"gpt-1.3b": 1.049, "gpt-1.3b-checkpointed": 1.177, "resnet152-b256": 1.063, "unet-b16-512": 1.090}


HEAPS = 2  # that a step asks for memory: small blocks lie apart
LENGTHS = (512, 896, 1280, 1664, 2048)
ANEW = 0.1  # of the pages: how many may be unmapped, and mapped elsewhere, for another plan, at 80 us each
WAITS = 4  # for the device in a step without a layout: each may cost it a millisecond


def replay(core: Core, events: list[list[int | str]]) -> None:
    places: dict[int, int] = {}
    for event in events:
        kind, ident = event[0], int(event[1])
        if kind == "a":
            places[ident] = core.allocate(int(event[2]))
        else:
            core.free(places.pop(ident))


def periods(name: str, count: int) -> list[tuple[Counts, float]]:
    """Of each what was counted, and what was reserved by what was alive.

    Without the ends of the two heaps, which take a page each that is used in part: of so large a GPU, 16 MiB.
    """
    data = json.loads(gzip.decompress((SEQUENCES / f"{name}.json.gz").read_bytes()))
    core = Core("memfd", hbm=80 * GiB, dram=0)
    for _, nbytes in data["live_at_start"]:
        core.allocate(nbytes)
    core.mark()
    seen = []
    for period in range(count):
        core.reset_peaks()
        replay(core, data["events"])
        counts = core.counts()
        seen.append((counts, (counts.hbm_peak - HEAPS * core.page_bytes) / counts.allocated_peak))
        core.mark()
        if period == 0:
            predicted = predict(Log(*core.log()))
            assert predicted is not None
            core.set_layout(predicted)
    return seen


@pytest.mark.parametrize("name", PYTORCH)
def test_reserved_is_what_is_alive_from_the_second_period_on(name: str) -> None:
    first, *later = periods(name, 4)
    assert first[1] < PYTORCH[name]  # best fit over pages, with nothing predicted
    for _, reserved in later:
        assert reserved < 1.001


def test_tensors_that_leave_early_and_groups_that_come_back_leave_few_holes() -> None:
    """Largest first, the same program needed 3.5% more than is alive; the core's best fit 2.2%."""
    _, *later = periods("gpt-moving", 3)
    for _, reserved in later:
        assert reserved < 1.005


def of_length(data: dict[str, Any], length: int) -> list[list[int | str]]:
    """The step with sequences of `length`: what has a parameter's size keeps it, the rest is in proportion."""
    kept = {round_up(nbytes, 512) for _, nbytes in data["live_at_start"]}
    return [
        event
        if event[0] == "f" or round_up(int(event[2]), 512) in kept
        else [event[0], event[1], max(1, int(event[2]) * length // LENGTHS[-1])]
        for event in data["events"]
    ]


@pytest.mark.parametrize("draw", range(3))
def test_reserved_is_what_is_alive_where_the_length_changes_from_step_to_step(draw: int) -> None:
    data = json.loads(gzip.decompress((SEQUENCES / "gpt-1.3b.json.gz").read_bytes()))
    steps = {length: of_length(data, length) for length in LENGTHS}
    ratios, most = [], 0
    with closing(Core("memfd", hbm=80 * GiB, dram=0)) as core:
        for _, nbytes in data["live_at_start"]:
            core.allocate(nbytes)
        pages = OnOneCore(core)
        pages.begin()
        for length in random.Random(draw).choices(LENGTHS, k=40):
            core.reset_peaks()
            replay(core, steps[length])
            counts = core.counts()
            most = max(most, counts.allocated_peak)  # of what is mapped for a long step, a short one leaves some idle
            ratios.append(counts.hbm_peak / most)
            pages.period_over()
    assert max(ratios[1:]) < 1.03
    assert float(np.median(ratios[1:])) < 1.001
    assert max(ratios[-10:]) < 1.001  # once each length has come back


def leaving(events: list[list[Any]], share: float, seed: int) -> list[list[Any]]:
    """The step in which a share of what lives past its middle is freed soon and asked for again before its end."""
    births = {event[1]: k for k, event in enumerate(events) if event[0] == "a"}
    deaths = {event[1]: k for k, event in enumerate(events) if event[0] == "f"}
    sizes = {event[1]: event[2] for event in events if event[0] == "a"}
    middle = len(events) // 2
    long = [i for i in births if sizes[i] >= MiB and births[i] < 0.98 * middle and deaths.get(i, 0) > 1.02 * middle]
    gone = set(random.Random(seed).sample(long, int(share * len(long))))
    told: list[tuple[float, list[Any]]] = []
    for k, (kind, ident, *rest) in enumerate(events):
        if ident not in gone:
            told.append((k, [kind, ident, *rest]))
        elif kind == "f":
            told.append((k, ["f", -ident]))
        else:
            told.append((k, ["a", ident, *rest]))
            told.append((min(k + 8.5, middle), ["f", ident]))
            told.append((max(deaths[ident] - 6.5, middle + 0.1), ["a", -ident, *rest]))
    return [event for _, event in sorted(told, key=lambda entry: entry[0])]


def most_alive(events: list[list[Any]]) -> int:
    alive = most = 0
    sizes = {event[1]: event[2] for event in events if event[0] == "a"}
    for kind, ident, *_ in events:
        alive += sizes[ident] if kind == "a" else -sizes[ident]
        most = max(most, alive)
    return most


@pytest.mark.parametrize("spare", [1.005, 1.06])
@pytest.mark.parametrize(
    ("name", "plans"),
    [
        ("resnet152-b256", ((1.0, 0), (0.6, 1), (0.62, 1))),
        ("gpt-1.3b", ((1.0, 0), (0.8, 3), (0.75, 3))),
    ],
)
def test_the_first_step_under_another_plan_reserves_little_more_than_is_alive(
    name: str, plans: tuple[tuple[float, int], ...], spare: float
) -> None:
    """By the layout of the plan before, it took 1.9% more; on a GPU, with pages in DRAM, up to 7%.

    And by best fit, which makes pages as long as there are some: 0.3% more for the ResNet, 3.6% for the GPT. With all
    that lies idle unmapped first, from two to five in six pages were mapped anew, which takes a GPT a second.
    """
    data = json.loads(gzip.decompress((SEQUENCES / f"{name}.json.gz").read_bytes()))
    steps = [leaving(data["events"], share, seed) for share, seed in plans]
    static = sum(nbytes for _, nbytes in data["live_at_start"])
    core = Core("memfd", hbm=round_up(int(spare * (static + max(map(most_alive, steps)))), PAGE), dram=4 * GiB)
    for _, nbytes in data["live_at_start"]:
        core.allocate(nbytes)
    pages = OnOneCore(core)
    pages.begin()
    before = core.counts()
    for number, events in enumerate(steps):
        waits = core.counts().waits
        for step in range(3):
            core.reset_peaks()
            replay(core, events)
            counts = core.counts()
            if number and step == 1:
                anew = min(counts.maps - before.maps, counts.unmaps - before.unmaps)
                assert anew < ANEW * counts.hbm / core.page_bytes
            if number or step:  # the very first step has no other before it
                most = 1.001 if step else 1.005
                assert (counts.hbm_peak + counts.dram_peak) / counts.allocated_peak < most
            if number and not step and spare > 1.01:
                assert counts.waits - waits <= WAITS
            if step == 2:
                before = counts
                next_one = steps[min(number + 1, len(steps) - 1)]
                pages.expect_new_plans(torch.device("cuda", 0), static + most_alive(next_one))
            pages.period_over()


@pytest.mark.parametrize("name", PYTORCH)
def test_a_steady_period_departs_from_nothing_and_maps_nothing(name: str) -> None:
    _, (second, _), (third, _) = periods(name, 3)
    assert (third.maps, third.unmaps, third.mispredicted, third.misplaced) == (second.maps, second.unmaps, 0, 0)


@pytest.mark.parametrize("name", PYTORCH)
def test_little_is_held_for_the_sake_of_a_neighbour_that_lives_longer(name: str) -> None:
    events = json.loads(gzip.decompress((SEQUENCES / f"{name}.json.gz").read_bytes()))["events"]
    births = {event[1]: k for k, event in enumerate(events) if event[0] == "a"}
    deaths = {event[1]: k for k, event in enumerate(events) if event[0] == "f"}
    sizes = np.array([-(-event[2] // 512) * 512 for event in events if event[0] == "a"])
    born, died = np.array(list(births.values())), np.array([deaths[ident] for ident in births])
    layout = pack(sizes, born, died, len(events))
    seconds = np.array([event[-1] for event in events]) / 1e6
    assert false_sharing_share(layout.offsets, sizes, seconds[born], seconds[died]) < 0.02
