"""A device and its host in simulated time: the one holds the other back while an iteration is recorded."""

from __future__ import annotations

import pytest

from torch_tiers.migrator.streams.hold import LONGEST, Hold

POSITIONS = 2000
ISSUES = 200e-6  # seconds of the host's from one position to the next
LOADS = 20e-3  # seconds before the first one: data is loaded
NEAR = 32  # positions


class Machine:
    """A host that issues what the device takes `busy` seconds for, position after position."""

    def __init__(self, busy: float) -> None:
        self.now = self.free = 0.0  # of the host, and when the device is through with what it has
        self.busy = busy
        self.held = 0.0
        self.idle = 0  # positions at which the device had nothing to do
        self.ends: list[Machine.Point] = []

    class Point:
        def __init__(self, machine: Machine) -> None:
            self.machine, self.at = machine, max(machine.now, machine.free)

        def query(self) -> bool:
            return self.at <= self.machine.now

    def mark(self) -> Point:
        return self.Point(self)

    def hold_up(self, seconds: float) -> None:
        self.free = max(self.now, self.free) + seconds
        self.held += seconds

    def run(self, waits_every: int = POSITIONS, issues: float = ISSUES) -> None:
        hold = Hold(self, self.mark, lambda: self.now)  # type: ignore[arg-type, return-value]
        hold.begin()
        self.now += LOADS
        for position in range(1, POSITIONS + 1):
            self.now += issues
            self.idle += self.free < self.now
            self.free = max(self.now, self.free) + self.busy
            self.ends.append(self.mark())
            if position % waits_every == 0:
                self.now = max(self.now, self.free)
            if hold.is_due(self.ends[-NEAR:][0]):  # type: ignore[arg-type]
                hold.begin()


@pytest.mark.parametrize("busy", [10e-6, 100e-6, 190e-6, 210e-6, 1e-3])
@pytest.mark.parametrize("issues", [100e-6, 200e-6, 1e-3, 2e-3])
def test_a_device_that_is_held_back_waits_for_no_host(busy: float, issues: float) -> None:
    """Also of a host that takes long from one position to the next."""
    machine = Machine(busy)
    machine.run(issues=issues)
    assert machine.idle <= POSITIONS / 50


@pytest.mark.parametrize("busy", [10e-6, 190e-6, 1e-3])
def test_the_host_does_not_wait_for_a_device_that_is_held_back(busy: float) -> None:
    """At most as long as it was held back last, and before that, at the end."""
    machine = Machine(busy)
    machine.run()
    assert machine.now <= LOADS + max(ISSUES, busy) * POSITIONS + 2 * LONGEST + NEAR * busy


@pytest.mark.parametrize("every", [2, 12, 100])
def test_a_program_that_waits_for_its_device_takes_twice_as_long_at_most(every: int) -> None:
    machine = Machine(50e-6)
    machine.run(waits_every=every)
    plain = LOADS + POSITIONS * (ISSUES + 50e-6)
    assert machine.now <= 2.2 * plain
    assert machine.idle <= POSITIONS / every, "but where it has just waited"
