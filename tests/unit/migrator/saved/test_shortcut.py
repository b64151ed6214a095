"""The shortcut in front of the hooks: with it and without, the same is packed, returned, raised and told the engine."""

from __future__ import annotations

import gc
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.natively import built
from torch_tiers.migrator.model.plan import PageGroup
from torch_tiers.migrator.offload.engine import Engine
from torch_tiers.migrator.planner.paces import Pace
from torch_tiers.migrator.recompute.verified import Verified
from torch_tiers.migrator.recording.recorder import Recorder
from torch_tiers.migrator.saved.actions import Action, Go, Moved, Recompute, Stay
from torch_tiers.migrator.saved.garbage import Allowance
from torch_tiers.migrator.saved.movable import MIN_BYTES
from torch_tiers.migrator.saved.saver import Saver

SITES = 6  # of one module
GROUP = PageGroup(("s",), 4096, last_birth=0, first_use=1)
UNSEEN = Verified({}, (), 0, frozenset())
_top = torch._C._autograd._top_saved_tensors_default_hooks


class _Compute:
    def __init__(self) -> None:
        self.captures = False

    def capturing(self) -> bool:
        return self.captures


class _Engine:
    """Remembers what it is told."""

    enter: Any = Engine.enter
    leave: Any = Engine.leave

    def __init__(self) -> None:
        self.compute = _Compute()
        self.told: list[object] = []
        group: Any = object()
        self.hbm = built().Occupancy({group: None}, deque([group]))  # one leaves, and one is to come back

    def relieve(self) -> None:
        self.told.append("relieve")

    def prefetch(self) -> None:
        self.told.append("prefetch")

    def counts(self) -> tuple[int, ...]:
        hbm = self.hbm
        return hbm.resident, hbm.limit, hbm.position, hbm.stayed, hbm.used_up


class _Mover:
    recorder = None

    def __init__(self) -> None:
        self.engine = _Engine()
        self.storages, self.dropped, self.verified = built().Storages(), {}, {}
        self.checks = SimpleNamespace(refused={"s"}, on=False)

    def take(self, tensor: Tensor, key: str, go: Go | None, kind: str = "") -> Moved:
        self.engine.told.append(("take", key, kind))
        saved = built().Saved(None, tensor, 0, tensor.nbytes)  # type: ignore[arg-type]
        return built().Moved(tensor, self, saved, None, go, None)  # type: ignore[arg-type]

    def drop(self, tensor: Tensor, make: Recompute, find: object, kind: str) -> Moved:
        """As where it does not hold any more."""
        self.engine.told.append(("drop", make.key))
        return self.take(tensor, make.key, None, kind)

    def restore(self, moved: Moved, *, count: bool = True) -> Tensor:
        self.engine.told.append(("restore", count))
        return moved.view(None)

    def begin_backward(self) -> None:
        self.engine.told.append("backward")


class _Rig:
    """Hooks over an engine that only remembers: with the shortcut, or those in Python alone."""

    def __init__(self, *, shortcut: bool = True) -> None:
        self.mover: Any = _Mover()
        self.iterations = 0
        self.saver = saver = Saver(lambda device: self.mover, lambda *_: None, self._over, Allowance(), built())
        self.pack, self.unpack = saver.hooks if shortcut else (saver.pack, saver.unpack)
        saver.replays = SimpleNamespace(note=self._note, packs=SimpleNamespace(note=self._note), end=lambda: None)  # type: ignore[assignment]

    def _note(self, tensor: Tensor, packed: object, key: str) -> None:
        self.mover.engine.told.append(("note", tensor.shape, key))

    def _over(self, saver: Saver) -> None:
        self.iterations += 1

    def plan(self, actions: list[Action | None], noted: set[int]) -> None:
        self.saver.adopt((f":{n}", action) for n, action in enumerate(actions) if action is not None)
        if noted:
            self.saver._agenda._noted[""] = noted  # as what is made from them would have it
        self.saver.place.iteration += 1

    def state(self) -> tuple[object, ...]:
        place, engine = self.saver.place, self.mover.engine
        return engine.told, engine.counts(), self.iterations, place.in_backward, place.here.count, place.here.path


@pytest.fixture
def rigs() -> tuple[_Rig, _Rig]:
    """One with the hooks in Python, one with the shortcut."""
    return _Rig(shortcut=False), _Rig()


# ------------------------------------------------------------------------------------------- random calls


class _Wrapped(Tensor):
    pass


def _tensors() -> dict[str, Callable[[], Tensor]]:
    return {
        "large": lambda: torch.randn(64, 64),
        "small": lambda: torch.randn(4),
        "empty": lambda: torch.empty(0),
        "a view": lambda: torch.randn(64, 64)[1:, ::2],
        "bool": lambda: torch.ones(8192, dtype=torch.bool),
        "made by a node": lambda: torch.randn(64, 64, requires_grad=True).exp(),
        "a parameter": lambda: nn.Parameter(torch.randn(64, 64)),
        "a view of a parameter": lambda: nn.Parameter(torch.randn(64, 64)).t(),
        "a subclass": lambda: torch.randn(64, 64).as_subclass(_Wrapped),
        "sparse": lambda: torch.eye(64).to_sparse(),
        "conjugated": lambda: torch.randn(64, 64, dtype=torch.complex64).conj(),
        "meta": lambda: torch.empty(64, 64, device="meta"),
    }


def _action(mover: Any, rng: random.Random) -> Action | None:
    pace = rng.choice([None, Pace(rng.randrange(9), rng.randrange(9), rng.choice([None, 5]), None)])
    if rng.random() < 0.5:
        return Stay(mover, rng.choice([0, 4096]), rng.choice([0, 4096]), pace)
    return rng.choice([None, Go(mover, GROUP, pace), Recompute(mover, "s", UNSEEN, pace)])


def _described(packed: object) -> object:
    if isinstance(packed, tuple):
        alias, version, stay, record = packed
        return "kept", alias.shape, alias.dtype, type(alias), alias.requires_grad, version, _of(stay), record
    moved: Any = packed
    return "moved", moved.size, moved.dtype, _of(moved.go), moved.record, moved.was_used


def _of(action: Any) -> object:
    return None if action is None else (type(action), action.pace, getattr(action, "enter", None))


class _Walk:
    """The same calls for both rigs, drawn at random."""

    def __init__(self, rigs: tuple[_Rig, _Rig], seed: int) -> None:
        self.rigs = rigs
        self.rng = random.Random(seed)
        self.held: list[tuple[Tensor, tuple[Any, Any]]] = []  # what was saved, and what each rig packed for it

    def each(self, do: Callable[[_Rig], Any]) -> tuple[Any, Any]:
        """Do it with both; they raise the same, or leave the same behind."""
        results: list[Any] = []
        for rig in self.rigs:
            try:
                results.append(do(rig))
            except RuntimeError as error:
                results.append(str(error))
        one, other = self.rigs
        assert one.state() == other.state()
        return results[0], results[1]

    def plan(self) -> None:
        draw = self.rng.random()
        noted = {n for n in range(SITES) if self.rng.random() < 0.2}
        self.each(
            lambda rig: rig.plan([_action(rig.mover, r) for r in [random.Random(draw)] for _ in range(SITES)], noted)
        )

    def save(self) -> None:
        make = _tensors()[self.rng.choice(list(_tensors()))]
        tensor = make()
        packed = self.each(lambda rig: rig.pack(tensor))
        assert _described(packed[0]) == _described(packed[1])
        self.held.append((tensor, packed))

    def ask(self) -> None:
        if not self.held:
            return
        tensor, (one, other) = self.rng.choice(self.held)
        packed = {self.rigs[0]: one, self.rigs[1]: other}
        back = self.each(lambda rig: rig.unpack(packed[rig]))
        if isinstance(back[0], str):
            assert back[0] == back[1] and "modified by an inplace operation" in back[0]
        else:
            for result in back:
                assert result.shape == tensor.shape and result._version == tensor._version
                assert result.is_sparse or result.is_meta or torch.equal(result, tensor)

    def change(self) -> None:
        plain = [tensor for tensor, _ in self.held if tensor.is_leaf and not tensor.is_sparse and tensor.numel()]
        if plain:
            with torch.no_grad():
                self.rng.choice(plain).zero_()

    def turn(self) -> None:
        """Backward begins, or a forward after it; or a capture."""
        what = self.rng.choice(["backward", "capture", "new period"])
        if what == "backward":
            self.each(lambda rig: setattr(rig.saver.place, "in_backward", True))
        elif what == "capture":
            self.each(lambda rig: vars(rig.mover.engine.compute).update(captures=not rig.mover.engine.compute.captures))
        else:
            self.each(lambda rig: rig.saver.end_iteration())
            self.held.clear()


@pytest.mark.parametrize("run", range(20))
def test_random_calls_have_the_same_effect(rigs: tuple[_Rig, _Rig], seed: int, run: int) -> None:
    walk = _Walk(rigs, seed)
    walk.plan()
    moves = [walk.save] * 8 + [walk.ask] * 8 + [walk.change, walk.turn, walk.plan]
    for _ in range(300):
        walk.rng.choice(moves)()


# ------------------------------------------------------------------------------- what it leaves to Python


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[_Rig, list[str]]]:
    """A rig, and which of the hooks in Python were called."""
    called: list[str] = []
    for name in ("pack", "unpack"):
        method = getattr(Saver, name)

        def spy(saver: Saver, given: Any, name: str = name, method: Callable[[Saver, Any], Any] = method) -> Any:
            called.append(name)
            return method(saver, given)

        monkeypatch.setattr(Saver, name, spy)
    yield _Rig(), called


def test_what_stays_and_what_moves_takes_the_shortcut(spied: tuple[_Rig, list[str]]) -> None:
    rig, called = spied
    rig.plan([None, Stay(rig.mover, 1, 1), Go(rig.mover, GROUP)], set())
    packed = [rig.pack(torch.randn(64, 64)) for _ in range(3)]
    assert called == ["pack"]  # the first, with which the module comes to the plan
    rig.unpack(packed[1])
    assert called == ["pack", "unpack"]  # nobody is in backward: somebody looks at what a node saved
    rig.saver.place.in_backward = True
    for one in packed:
        rig.unpack(one)
    assert called == ["pack", "unpack"]


def test_a_module_that_comes_again_takes_the_shortcut_with_its_first_tensor(spied: tuple[_Rig, list[str]]) -> None:
    """A third of what a ResNet saves is the first of its module."""
    rig, called = spied
    rig.plan([Stay(rig.mover, 1, 1)] * 2, set())
    rig.pack(torch.randn(8))
    called.clear()
    rig.saver.place.iteration += 1
    packed = rig.pack(torch.randn(8))
    assert isinstance(packed, tuple) and packed[2] is rig.saver.place.here.actions[0]
    assert called == [] and rig.saver.place.here.count == 1
    rig.plan([None, None, Stay(rig.mover, 2, 2)], set())  # there is another plan: it has to be looked up
    assert rig.pack(torch.randn(8))[2] is None  # type: ignore[index]
    assert called == ["pack"]


def test_what_is_recorded_is_left_to_python(spied: tuple[_Rig, list[str]]) -> None:
    rig, called = spied
    rig.plan([Stay(rig.mover, 1, 1)] * 4, {2})
    for _ in range(3):
        rig.pack(torch.randn(64, 64))
    assert called == ["pack"]  # the first
    rig.saver.place.recording = True
    rig.pack(torch.randn(64, 64))
    assert called == ["pack"] * 2


def test_what_is_saved_within_backward_is_left_to_python(spied: tuple[_Rig, list[str]]) -> None:
    """A checkpoint's recomputation, say: it is no site of the plan's."""
    rig, called = spied
    rig.plan([Stay(rig.mover, 1, 1)] * 4, set())
    rig.pack(torch.randn(8))
    x = torch.randn(8, requires_grad=True)

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            rig.pack(grad)
            return grad

    Saves.apply(x).sum().backward()
    assert called == ["pack", "pack"]
    assert rig.saver.place.here.count == 1


def test_an_iteration_that_ends_with_an_error_is_followed_by_one_that_is_recorded_if_that_was_decided() -> None:
    """Whoever catches the error may go on, and what is recorded must not take the shortcut."""
    rig = _Rig()
    rig.plan([Stay(rig.mover, 1, 1)] * 4, set())
    rig.pack(torch.randn(8))
    rig.saver.movers.by_device[torch.device("cpu")] = rig.mover

    def raises(saver: Saver) -> None:
        rig.mover.recorder = Recorder(set())
        raise RuntimeError("no plan fits")

    rig.saver._iteration_over = raises
    rig.saver.place.in_backward = True
    with pytest.raises(RuntimeError, match="no plan fits"):
        rig.saver.end_iteration()
    assert rig.saver.place.recording


def test_hooks_on_the_stack_are_known_as_their_saver_s() -> None:
    saver = _Rig().saver
    saver.push()
    try:
        assert saver.on_top()
        assert _top(True)[0].__self__ is saver
    finally:
        assert saver.take_off()


def test_a_hook_wants_one_argument() -> None:
    pack: Any = _Rig().pack
    for call in (lambda: pack(), lambda: pack(1, 2), lambda: pack(tensor=1)):
        with pytest.raises(TypeError):
            call()


def test_what_it_makes_dies_with_its_references() -> None:
    rig = _Rig()
    rig.plan([Stay(rig.mover, 1, 1), Stay(rig.mover, 1, 1), Go(rig.mover, GROUP)], set())
    rig.pack(torch.zeros(4))
    for _ in ("stays", "moves"):
        tensor = torch.randn(64, 64)
        storage = tensor.untyped_storage()._weak_ref()
        packed = rig.pack(tensor)
        rig.saver.place.in_backward = True
        again = rig.unpack(packed)
        rig.saver.place.in_backward = False
        del tensor, packed, again
        assert torch.UntypedStorage._expired(storage)
        torch.UntypedStorage._free_weak_ref(storage)


def test_the_collector_finds_a_saver_that_nobody_refers_to() -> None:
    """It and its hooks refer to one another."""
    rig = _Rig()
    gone = weakref.ref(rig.saver)
    del rig
    gc.collect()
    assert gone() is None


def test_least_is_what_the_hooks_go_by() -> None:
    rig = _Rig()
    rig.plan([None, *[Go(rig.mover, GROUP)] * 2], set())
    rig.pack(torch.zeros(4))
    assert isinstance(rig.pack(torch.zeros(MIN_BYTES // 4 - 1)), tuple)
    assert not isinstance(rig.pack(torch.zeros(MIN_BYTES // 4)), tuple)
