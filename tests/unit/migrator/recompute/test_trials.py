"""What is entered into the trace as a recipe."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_tiers as tiers
from torch_tiers.allocator.errors import TiersError
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.offload.engine import Engine
from torch_tiers.migrator.offload.group import Group, Saved
from torch_tiers.migrator.offload.transport import Transport
from torch_tiers.migrator.recompute.replays import Replay
from torch_tiers.migrator.recompute.trials import Trial, Trials
from torch_tiers.migrator.recompute.verified import Took, Verified, layout
from torch_tiers.migrator.saved.dropped import Dropped, Recomputed
from torch_tiers.migrator.saved.packed import Look, keep
from torch_tiers.migrator.streams.host import HostCompute
from torch_tiers.migrator.streams.meter import HostMeter
from torch_tiers.migrator.telemetry.counters import Counters


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(64, 256), nn.Linear(256, 64)
        self.block = nn.Sequential(nn.LayerNorm(256, eps=1e-3), nn.Linear(256, 256), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        h = self.block(self.first(x))
        return self.last(F.layer_norm(h, (256,)))


def recorded(steps: int = 3, rows: int = 128, model: nn.Module | None = None, **options: str) -> Trace:
    """The trace of an iteration; by default with room for everything."""
    model = model or Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tiers.session(policy="auto", dram="256MiB", **options) as session:
        for _ in range(steps):
            model(torch.randn(rows, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        saver = session.runtime.saver()
        assert saver is not None
        (mover,) = saver.movers.armed
        return mover.learner.traces[-1]


def operations(trace: Trace) -> dict[str, str]:
    return {site.key: trace.recipes[site.storage].op for site in trace.sites if site.storage in trace.recipes}


def test_recipes_are_those_of_modules_and_functions() -> None:
    trace = recorded()
    assert {key: op.partition("(")[0] for key, op in operations(trace).items()} == {
        "Model.block.1:0": "native_layer_norm",
        "Model:0": "gelu",
        "Model.last:0": "native_layer_norm",  # of no module
        ":0": "addmm",
        "Model.block.2:0": "addmm",
        "Model.block.0:1": "addmm",  # of the batch
    }
    assert all(recipe.seconds > 0 for recipe in trace.recipes.values())


@pytest.mark.parametrize("error", [RuntimeError("no such kernel"), TiersError("no room to bring an input back")])
def test_a_trial_that_fails_makes_no_recipe_and_the_program_goes_on(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Replay.run

    def fails(self: Replay, values: Sequence[Tensor]) -> Tensor:
        if self.names[0].startswith("native_layer_norm"):
            raise error
        return run(self, values)

    monkeypatch.setattr(Replay, "run", fails)
    assert {op.partition("(")[0] for op in operations(recorded()).values()} == {"gelu", "addmm"}


def test_a_recipe_names_the_storages_that_it_needs() -> None:
    trace = recorded()
    storage = {site.key: site.storage for site in trace.sites}
    assert trace.recipes[storage["Model:0"]].inputs == (storage["Model.block.2:0"],)
    assert trace.recipes[storage["Model.last:0"]].inputs == (storage["Model:0"],)


def test_what_is_not_the_same_bit_for_bit_is_no_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Replay.run

    def almost(self: Replay, values: Sequence[Tensor]) -> list[Tensor]:
        made = run(self, values)
        return [made[0] * (1 + 1e-7)] if self.names[0].startswith("gelu") else made

    monkeypatch.setattr(Replay, "run", almost)
    found = {op.partition("(")[0] for op in operations(recorded()).values()}
    assert "gelu" not in found
    assert "native_layer_norm" in found


def test_every_position_has_a_time_and_the_memory_beside_it() -> None:
    trace = recorded()
    assert len(trace.times) == trace.positions
    assert len(trace.others) == trace.positions + 1
    assert list(trace.times) == sorted(trace.times)
    assert 0 <= trace.times[0] <= trace.times[-1] <= trace.seconds
    weights = sum(parameter.nbytes for parameter in Model().parameters())
    assert min(trace.others) >= weights


def test_sites_know_the_class_of_their_module() -> None:
    trace = recorded()
    kinds = {site.key: site.kind for site in trace.sites}
    assert (kinds["Model.block.0:0"], kinds["Model.last:0"], kinds["Model:0"]) == ("LayerNorm", "Linear", "Model")


@pytest.mark.parametrize("steps", [2, 6])
def test_a_recipe_is_tried_once_in_a_program(steps: int) -> None:
    tried = 0
    from torch_tiers.migrator.recompute import trials

    plain = trials.Trials.attempt

    def attempt(self: trials.Trials, *arguments: object) -> None:
        nonlocal tried
        tried += 1
        plain(self, *arguments)  # type: ignore[arg-type]

    with mock.patch.object(trials.Trials, "attempt", attempt):
        recorded(steps)
    assert tried <= 2 * 4  # two recorded iterations: before there is an optimizer's state, and with it


def test_trials_change_nothing_about_what_comes_back_and_when(monkeypatch: pytest.MonkeyPatch) -> None:
    brought: list[tuple[int, int]] = []
    looked: list[Saved] = []
    fetch, glimpse = Transport.fetch, Engine.glimpse

    def note(transport: Transport, group: Group) -> None:
        brought.append((group.next_use, group.nbytes))
        fetch(transport, group)

    def look(engine: Engine, saved: Saved) -> Tensor | None:
        looked.append(saved)
        with mock.patch.object(Transport, "fetch", fetch):
            return glimpse(engine, saved)

    monkeypatch.setattr(Transport, "fetch", note)
    monkeypatch.setattr(Engine, "glimpse", look)
    recorded(2, rows=4096, hbm="4MiB")  # until there is a plan, next to nothing may stay
    with_trials, brought = brought, []
    monkeypatch.setattr(Trials, "attempt", lambda *_: None)
    recorded(2, rows=4096, hbm="4MiB")
    assert looked
    assert with_trials == brought != []


def test_an_input_that_is_away_is_copied_once_a_trial_and_not_while_that_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies: list[int] = []
    inputs: list[int] = []
    attempt, fetch = Trials.attempt, Transport.fetch

    def counted(transport: Transport, group: Group) -> None:
        copies[-1] += 1
        fetch(transport, group)

    def one(trials: Trials, trial: Trial, *others: object) -> None:
        copies.append(0)
        assert trial.what is not None
        inputs.append(len(trial.what.inputs))
        attempt(trials, trial, *others)  # type: ignore[arg-type]
        copies.append(0)  # those of the program

    monkeypatch.setattr(Trials, "attempt", one)
    monkeypatch.setattr(Transport, "fetch", counted)
    copies.append(0)
    recorded(2, rows=4096, hbm="4MiB")
    of_trials = copies[1::2]
    assert any(of_trials)
    assert all(number <= most for number, most in zip(of_trials, inputs, strict=True))


def replay(run: Callable[[Sequence[Tensor]], Tensor], *inputs: Any, keys: tuple[str, ...] = ()) -> Any:
    """What makes a tensor again by a function."""
    all_of_it = {"names": ["op"], "makes": [None], "call": (0, 0)}
    return SimpleNamespace(inputs=inputs, keys=keys, run=lambda values: [run(values)], **all_of_it)


def trial(x: Tensor, run: Callable[[Sequence[Tensor]], Tensor]) -> Trial:
    verified = Verified({"op": Took(0.0, 0)}, layout(x), x._version, frozenset())
    return Trial(1, replay(run), 0, verified, (), tuple(x.size()), x.stride(), 0, x.nbytes)


def test_what_is_in_use_only_while_a_replay_runs_is_its_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a convolution's workspace: a plan that did not know of it exceeded its budget by 4%."""
    x = torch.ones(1024)
    in_use, highest = 10 * x.nbytes, [0]

    def most(meter: object) -> int:
        told, highest[0] = max(highest[0], in_use), in_use
        return told

    def run(values: object) -> Tensor:
        highest[0] = in_use + x.nbytes + 7000
        return x.clone()

    monkeypatch.setattr(HostMeter, "most", most)
    trials = Trials(HostMeter(HostCompute(Counters())), {})
    trials.attempt(trial(x, run), x, lambda packed: x)
    recipe, verified = trials.results()[1]
    assert recipe.scratch == verified.held["op"].scratch == 7000


def test_what_is_timed_finds_memory_that_another_run_gave_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where HBM is short, to map half a GiB takes the host 5 ms, and a GELU of as much that takes 0.4 took 5.7."""
    x = torch.ones(1024)
    alive, events = set[int](), []

    def run(values: object) -> Tensor:
        events.append(f"run beside {len(alive)}")
        made = x.clone()
        alive.add(len(events))
        weakref.finalize(made, alive.discard, len(events))
        return made

    mark = HostMeter.mark
    monkeypatch.setattr(HostMeter, "mark", lambda meter: (events.append("mark"), mark(meter))[1])
    trials = Trials(HostMeter(HostCompute(Counters())), {})
    events.clear()
    trials.attempt(trial(x, run), x, lambda packed: x)
    assert events == ["mark", "run beside 0", "mark", "run beside 0", "mark", "mark"]


def test_where_a_known_replay_finds_its_inputs_is_learned_anew() -> None:
    x = torch.zeros(4)
    what = replay(lambda values: x, keys=("Model.block:4",))  # one more was saved before it
    before = Verified({what.names[0]: Took(1e-3, 0)}, layout(x), x._version, frozenset({"Model.block:3"}))
    trials = Trials(mock.Mock(), {"Model.next:0": before})
    assert trials.knows(7, "Model.next:0", x, what, 0, (1,), before.choices)
    _, verified = trials.results()[7]
    assert verified.found == {"Model.block:3", "Model.block:4"}


def test_what_held_with_other_kernels_is_tried_again() -> None:
    x = torch.zeros(4)
    what = replay(lambda values: x)
    before = Verified({what.names[0]: Took(1e-3, 0)}, layout(x), x._version, frozenset(), choices=("tf32",))
    trials = Trials(mock.Mock(), {"Model:0": before})
    assert not trials.knows(7, "Model:0", x, what, 0, (), ("fp32",))


def test_what_a_trial_takes_in_two_ways_is_recomputed_once() -> None:
    """In a residual network each block has two ways to every one before it, and every one was gone."""
    runs = 0

    def added(values: Sequence[Tensor]) -> Tensor:
        nonlocal runs
        runs += 1
        return values[0] + values[1]

    engine, ones = mock.Mock(empty=lambda dtype: torch.empty(0, dtype=dtype)), torch.ones(4)
    packed: Any = keep(ones)
    for _ in range(24):
        made = Recomputed(torch.empty(4), replay(added, packed, packed), 0, engine)
        packed = Dropped(ones, made, mock.Mock(), None)
    assert Look()(packed).tolist() == [2.0**24] * 4
    assert runs == 24


def test_operators_of_two_records_are_not_taken_for_one() -> None:
    """A teacher's forward without gradients ends a record, and numbers begin anew: plans had the second for free."""

    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x).tanh())

    student, teacher = Student(), nn.Linear(64, 64)
    with tiers.session(policy="auto", dram="256MiB") as session:
        for _ in range(4):
            one = student(torch.ones(64, 64))
            with torch.no_grad():
                told = teacher(torch.ones(64, 64))
            (one + student(torch.full((64, 64), 0.5)) - told).square().mean().backward()
        saver = session.runtime.saver()
        assert saver is not None
        trace = saver.movers.armed[0].learner.traces[-1]
    calls = [recipe.call for recipe in trace.recipes.values()]
    assert len(calls) > 1 and len(set(calls)) == len(calls)
