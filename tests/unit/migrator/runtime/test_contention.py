"""The whole of it without a GPU: a program trains over lanes whose bandwidth follows a script, in time of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from statistics import median
from time import perf_counter
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import torch_tiers as tiers
from tests.scenarios import batch, bits
from tests.unit.migrator.runtime.test_backoff import reversals
from torch_tiers.allocator.sizes import MiB
from torch_tiers.assembly import Session
from torch_tiers.migrator.model.links import PCIE_GEN5, Links
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.offload.engine import EVERY
from torch_tiers.migrator.planner import low_traffic
from torch_tiers.migrator.planner.build import make_plan
from torch_tiers.migrator.policies import POLICIES
from torch_tiers.migrator.runtime import devices
from torch_tiers.migrator.runtime.backoff import LEAST_GROUPS, Response
from torch_tiers.migrator.saved import learning_room
from torch_tiers.migrator.streams import Event, Stream
from torch_tiers.migrator.streams.host import HostEvent
from torch_tiers.migrator.streams.pieces import Piece, at_full_speed, flat
from torch_tiers.migrator.telemetry.counters import Counters
from torch_tiers.migrator.telemetry.now import Now
from torch_tiers.migrator.telemetry.transfers import Transfer
from torch_tiers.monitor.calibration import Calibration
from torch_tiers.monitor.sensors import Choice
from torch_tiers.monitor.sensors.copies import Copies
from torch_tiers.monitor.thread import Monitor
from torch_tiers.monitor.verdict import Judge
from torch_tiers.monitor.watch import Watch

CPU = torch.device("cpu")
SPEED = 50e9  # of a lane that is alone
DEPTH = 10  # layers, each of which saves 1 MiB
ROOM = 2 * MiB
STEP = 0.1  # seconds
REACTION, RECOVERY = 5, 50  # steps


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These are thousands of short operations: on a busy machine threads that wait for one another take minutes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Link:
    """The script's side of the lanes: what is left of them now, and what they do to each other."""

    left: float = 1.0
    now: float = 0.0
    trembling: Callable[[], float] = lambda: 1.0


class ScriptedLane:
    """Copies at once, and tells the times that the script would have had it take."""

    def __init__(self, link: Link, name: str, counters: Counters) -> None:
        self._link, self._name, self._counters = link, name, counters
        self._free = 0.0
        self._over: list[Transfer] = []

    def copy(self, pieces: Iterable[Piece], after: Sequence[Event], behind: Stream = None) -> HostEvent:
        pieces = tuple(pieces)
        for event in after:
            event.synchronize()
        for target, at, source, start, size in pieces:
            flat(target, at, size).copy_(flat(source, start, size))
        nbytes = sum(piece.nbytes for piece in pieces)
        self._counters.moved[self._name] += nbytes
        begin = max(self._free, self._link.now)
        self._free = begin + nbytes / (SPEED * self._link.left * self._link.trembling())
        if at_full_speed(pieces):
            self._over.append(Transfer(self._name, nbytes, begin, self._free))
        done = HostEvent()
        done.set()
        return done

    def over(self, since: Event) -> list[Transfer]:
        over, self._over = self._over, []
        return over

    def close(self) -> None:
        pass


class Late:
    """A watch that answers as its thread does at worst: an iteration later."""

    def __init__(self, link: Link) -> None:
        calibration = Calibration()
        self.link = link
        self.watch = Watch(lambda: Choice((), {}), Copies(calibration, self.clock), Judge(calibration), self.clock)

    def clock(self) -> float:
        return self.link.now

    def iteration_over(self, transfers: Sequence[Transfer], moved: Mapping[str, int], now: Now) -> Response:
        last = self.watch.response
        self.watch.feed(transfers, moved)
        self.watch.tick()
        return last


def no_growth(trace: Trace, budget: int, links: Links) -> Plan:
    """Stands for a planner: moves everything while the links are whole, and half of it while they are not."""
    lives = [life.ident for life in trace.lifetimes]
    moves = lives if links.h2d > 0.9 * PCIE_GEN5.h2d else lives[::2]
    plan = make_plan("move", trace, set(moves), ROOM)
    return replace(plan, room=plan.kept_bytes + ROOM)


class Layers(nn.Module):
    """Saves what each layer makes, and takes little time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.randn(128))
        self.biases = nn.ParameterList(torch.randn(128) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for bias in self.biases:
            x = torch.relu(x + bias)
        return x


class Training:
    """A program that trains; `run` goes so many steps and tells what the runtime did in each."""

    def __init__(self, session: Session, link: Link, watch: Watch) -> None:
        self.session, self.link, self.watch = session, link, watch
        self.model = Layers()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.losses: list[torch.Tensor] = []
        self.ahead: list[int] = []
        self.moved: list[int] = []
        self.shares: list[float] = []

    def run(self, steps: int, left: float) -> range:
        self.link.left = left
        first = len(self.ahead)
        for _ in range(steps):
            before = sum(self.session.stats()["moved"].values())
            loss = self.model(batch(CPU, len(self.losses))).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.link.now += STEP
            self.losses.append(loss.detach())
            self.moved.append(sum(self.session.stats()["moved"].values()) - before)
            (saver,) = self.session.runtime._savers
            self.ahead.append(saver.movers.armed[0].engine.ahead)
            self.shares.append(self.watch.backoff.share)
        return range(first, len(self.ahead))


@contextmanager
def training(trembling: Callable[[], float] = lambda: 1.0) -> Iterator[Training]:
    link = Link(trembling=trembling)
    advisor = Late(link)
    with (
        mock.patch.object(learning_room, "learning_room", lambda *_: ROOM),
        mock.patch.object(low_traffic, "LOW_TRAFFIC", 0.0),  # it moves little, which might stay
        mock.patch.object(devices, "POLICIES", {**POLICIES, "move": no_growth}),
        mock.patch.object(devices, "HostLane", lambda name, counters: ScriptedLane(link, name, counters)),
        tiers.session(policy="move", dram="64MiB", monitor_enabled=False) as session,
    ):
        session.runtime.advise(advisor)
        yield Training(session, link, advisor.watch)


def test_the_first_reaction_comes_within_five_steps_and_the_recovery_within_fifty_and_plans_follow() -> None:
    with training() as program:
        calm = program.run(20, left=1.0)
        loaded = program.run(30, left=0.7)
        over = program.run(RECOVERY, left=1.0)
    assert {program.ahead[k] for k in calm} == {EVERY}
    assert next(k for k in loaded if program.ahead[k] < EVERY) - loaded[0] < REACTION
    assert program.ahead[loaded[-1]] == LEAST_GROUPS
    assert program.ahead[over[-1]] == EVERY
    all_of_it = program.moved[calm[-1]]
    assert program.moved[loaded[-1]] == pytest.approx(all_of_it / 2, rel=0.1)
    assert program.moved[over[-1]] == all_of_it


def test_results_do_not_depend_on_it() -> None:
    with training() as program:
        for left in (1.0, 0.6, 1.0):
            program.run(15, left=left)
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = []
    for k in range(len(program.losses)):
        loss = model(batch(CPU, k)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        plain.append(loss.detach())
    assert bits(program.losses) == bits(plain)


@pytest.mark.parametrize("left", [0.89, 0.7, 0.4])
def test_under_a_constant_load_it_does_not_oscillate(left: float, seed: int) -> None:
    random = Random(seed)
    with training(lambda: random.gauss(1, 0.02)) as program:
        program.run(20, left=1.0)
        program.run(100, left=left)
    assert reversals(program.shares[20:]) <= 1


def test_what_changed_is_said_once_with_the_numbers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "tiers"), training() as program:
        program.run(15, left=1.0)
        program.run(30, left=0.7)
        program.run(RECOVERY, left=1.0)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("monitor")]
    assert lines == list("monitor: " + line for line in program.watch.changes)
    assert len(lines) == 4  # less, plans, rising with plans as before, full
    assert "saturated, by whom is unknown" in lines[0]
    assert "h2d 79%" in lines[0]
    assert lines[-1].endswith("no longer backed off")


def test_the_training_thread_hardly_notices() -> None:
    """Half a percent of a step of a hundred milliseconds is 500 us; an iteration of two full lanes is handed over."""
    calibration = Calibration()
    monitor = Monitor(Watch(lambda: Choice((), {}), Copies(calibration), Judge(calibration)))
    transfers = [Transfer(lane, 64 * MiB, k, k + 0.5) for lane in ("d2h", "h2d") for k in range(32)]
    times = []
    for _ in range(300):
        start = perf_counter()
        monitor.iteration_over(transfers, {"d2h": 0, "h2d": 0})
        times.append(perf_counter() - start)
    monitor.close()
    assert median(times) < 500e-6


def test_a_tick_takes_little() -> None:
    calibration = Calibration()
    watch = Watch(lambda: Choice((), {}), Copies(calibration), Judge(calibration))
    transfers = [Transfer(lane, 64 * MiB, k, k + 0.5) for lane in ("d2h", "h2d") for k in range(32)]
    times = []
    for _ in range(100):
        watch.feed(transfers, {"d2h": 0, "h2d": 0})
        start = perf_counter()
        watch.tick()
        times.append(perf_counter() - start)
    print(f"a tick takes {median(times) * 1e6:.0f} us")
    assert median(times) < 20e-3
