"""Real allocation sequences through the core, without a GPU: from the second period on nothing is wasted.

The sequences are one training step each, taken from PyTorch's memory history on an H100; `events` are
requests and frees in order, `live_at_start` what lives as long as the program.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from allocator.native import Core, Counts
from allocator.packing import pack
from allocator.sequence import Log, foresee
from allocator.sharing import shared_share
from allocator.sizes import GiB

SEQUENCES = Path(__file__).parents[2] / "data" / "sequences"
PYTORCH = {"gpt-1.3b": 1.049, "gpt-1.3b-checkpointed": 1.177, "resnet152-b256": 1.063, "unet-b16-512": 1.090}


def replay(core: Core, events: list[list[int | str]]) -> None:
    places: dict[int, int] = {}
    for event in events:
        kind, ident = event[0], int(event[1])
        if kind == "a":
            places[ident] = core.allocate(int(event[2]))
        else:
            core.free(places.pop(ident))


def periods(name: str, count: int) -> list[Counts]:
    data = json.loads(gzip.decompress((SEQUENCES / f"{name}.json.gz").read_bytes()))
    core = Core("memfd", hbm=80 * GiB, dram=0)
    for _, nbytes in data["live_at_start"]:
        core.allocate(nbytes)
    core.mark()
    seen = []
    for period in range(count):
        core.reset_peaks()
        replay(core, data["events"])
        seen.append(core.counts())
        core.mark()
        if period == 0:
            foreseen = foresee(Log(*core.log()))
            assert foreseen is not None
            core.plan(foreseen)
    return seen


@pytest.mark.parametrize("name", PYTORCH)
def test_reserved_is_what_is_alive_from_the_second_period_on(name: str) -> None:
    first, *later = periods(name, 4)
    assert first.hbm_peak / first.allocated_peak < PYTORCH[name]  # best fit over pages, with nothing foreseen
    for counts in later:
        assert counts.hbm_peak / counts.allocated_peak < 1.001


@pytest.mark.parametrize("name", PYTORCH)
def test_a_steady_period_departs_from_nothing_and_maps_nothing(name: str) -> None:
    _, second, third = periods(name, 3)
    assert (third.maps, third.unmaps, third.departed, third.misplaced) == (second.maps, second.unmaps, 0, 0)


@pytest.mark.parametrize("name", PYTORCH)
def test_little_is_held_for_the_sake_of_a_neighbour_that_lives_longer(name: str) -> None:
    events = json.loads(gzip.decompress((SEQUENCES / f"{name}.json.gz").read_bytes()))["events"]
    births = {event[1]: k for k, event in enumerate(events) if event[0] == "a"}
    deaths = {event[1]: k for k, event in enumerate(events) if event[0] == "f"}
    sizes = np.array([-(-event[2] // 512) * 512 for event in events if event[0] == "a"])
    born, died = np.array(list(births.values())), np.array([deaths[ident] for ident in births])
    layout = pack(sizes, born, died, len(events))
    seconds = np.array([event[-1] for event in events]) / 1e6
    assert shared_share(layout.offsets, sizes, seconds[born], seconds[died]) < 0.02
