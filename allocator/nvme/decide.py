"""Decides by which way GPU memory goes to each directory: by facts and, where a direct way is open, by measuring."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch_tiers.allocator.nvme.facts import Machine, Place, read_machine, read_place
from torch_tiers.allocator.nvme.ways import (
    DIRECT,
    NAMES,
    Choice,
    Direct,
    Gds,
    Measured,
    Obstacle,
    Speeds,
    Way,
    choose_all,
    closed,
    obstacles,
)

Measuring = Callable[[Sequence[Way], Machine, Place, Path | None], Mapping[Way, Measured]]


@dataclass(frozen=True, slots=True)
class Decided:
    """One directory: its facts, what closes the direct ways, what was measured, and the way taken."""

    place: Place
    possible: Mapping[Direct, Obstacle | None]
    measured: Mapping[Way, Measured]
    choice: Choice

    def describe(self) -> str:
        """One phrase: the way, the speeds or why ``host`` has none, and why it is not direct."""
        said = [NAMES[self.choice.way]]
        for way, it in self.measured.items():
            if isinstance(it, Speeds):
                said.append(_rates(way, it))
            elif way == "host":
                said.append(it)
        text = ", ".join(said)
        return text if self.choice.why_not is None else f"{text}; not direct: {self.choice.why_not}"


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided for all directories of a store."""

    machine: Machine
    directories: Mapping[Path, Decided]

    @property
    def direct(self) -> bool:
        """Whether GPU memory goes straight to all of them."""
        return bool(self.directories) and all(each.choice.direct for each in self.directories.values())

    @property
    def obstacle(self) -> Obstacle | None:
        """Why GPU memory does not go straight to all of them; without directories, why it cannot on this machine."""
        if not self.directories:
            return closed(obstacles(self.machine))
        choices = (each.choice for each in self.directories.values())
        return next((Obstacle(it.why_not, it.change) for it in choices if it.why_not is not None), None)

    def closed_by(self, why: Obstacle) -> Decision:
        """A copy of the decision in which all directories go through host memory, for this reason."""
        choice = Choice("host", why_not=why.reason, change=why.change)
        directories = {path: replace(each, choice=choice) for path, each in self.directories.items()}
        return replace(self, directories=directories)

    @property
    def ways(self) -> set[Way]:
        """The ways that are taken."""
        return {each.choice.way for each in self.directories.values()}


def decide(
    directories: Sequence[Path],
    gds: Gds,
    cache: Path | None,
    gpu: str | None,
    *,
    measuring: Measuring | None,
    host_alone: bool = False,
) -> Decision:
    """Decide for all directories. Where only ``host`` is possible, nothing is measured unless `host_alone` is set.

    Parameters
    ----------
    cache
        The directory that keeps what was measured; None keeps nothing.
    gpu
        The uuid of the GPU whose memory is to go there; None if there is none.
    measuring
        What measures, such as `speeds`; None measures nothing.
    host_alone
        Measure ``host`` also where it is the only way, to report its speed.

    Raises
    ------
    TiersError
        If `gds` is ``"require"`` and a directory has no direct way; says why.
    """
    machine = read_machine(gpu)
    found: dict[Path, tuple[Mapping[Direct, Obstacle | None], Mapping[Way, Measured]]] = {}
    places = {path: read_place(path) for path in directories}
    possible = {path: obstacles(machine, at) for path, at in places.items()}
    # One closed directory closes the store: then the others need not be measured either.
    worth = gds != "off" and measuring is not None and all(None in ways.values() for ways in possible.values())
    for path, at in places.items():
        measured: Mapping[Way, Measured] = {}
        open_ways = [way for way in DIRECT if worth and possible[path][way] is None]
        if measuring is not None and (worth or (host_alone and machine.gpu is not None)):
            measured = measuring(["host", *open_ways], machine, at, cache)
        found[path] = possible[path], measured
    choices = choose_all(found, gds)
    return Decision(machine, {path: Decided(places[path], *found[path], choices[path]) for path in directories})


def _rates(way: Way, speeds: Speeds) -> str:
    return f"{way} {speeds.write / 1e9:.1f}/{speeds.read / 1e9:.1f}/{speeds.both / 1e9:.1f} GB/s write/read/both"
