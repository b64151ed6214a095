"""Programs of random operators, views and writes: what a closure makes has the same bits, or there is none."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.unit.migrator.tape.records import in_another_thread
from torch_tiers.migrator.tape.closure import Closure, Differs, Refused, Stops
from torch_tiers.migrator.tape.recorder import Recorder

Pool = list[Tensor]
Make = Callable[[random.Random, Pool], object]


def pick(rng: random.Random, pool: Pool) -> Tensor:
    return pool[-1 - min(int(rng.expovariate(0.25)), len(pool) - 1)]


def floats(rng: random.Random, pool: Pool) -> Tensor:
    return rng.choice([each for each in pool if each.is_floating_point()])


def square(rng: random.Random, pool: Pool) -> Tensor:
    """Of four by four."""
    x = floats(rng, pool)
    return x if x.shape == (4, 4) else x.reshape(-1)[:1].float().expand(16).reshape(4, 4)


def view(rng: random.Random, pool: Pool) -> object:
    x = pick(rng, pool)
    if x.dim() == 0:
        return x.expand(3, 2)
    ways: list[Callable[[], object]] = [
        lambda: x.transpose(0, -1),
        lambda: x[1:],
        lambda: x[..., ::2],
        lambda: x.reshape(-1),
        lambda: x.unsqueeze(0),
        lambda: x.select(0, 0) if x.shape[0] else x,
        lambda: list(x.split(2)),
        lambda: x.view(torch.int32) if x.dtype == torch.float32 else x.detach(),
        lambda: x.unfold(0, 2, 1) if x.shape[0] >= 2 else x.diagonal(0, 0, -1),
    ]
    return rng.choice(ways)()


def pointwise(rng: random.Random, pool: Pool) -> object:
    x = floats(rng, pool)
    return rng.choice([torch.sin, torch.neg, torch.sigmoid, torch.clone, torch.zeros_like, torch.Tensor.double])(x)


def number(rng: random.Random, pool: Pool) -> object:
    x = pick(rng, pool)
    return rng.choice([lambda: x * 2, lambda: x + 1.5, lambda: 3 - x, lambda: x.clamp(-1, 1), lambda: x.pow(2)])()


def product(rng: random.Random, pool: Pool) -> object:
    one, other = square(rng, pool), square(rng, pool)
    if rng.random() < 0.3:
        return torch.addmm(other.float(), one.float(), other.float().t(), beta=0.5)
    return one.float() @ other.float()


def several(rng: random.Random, pool: Pool) -> object:
    x = square(rng, pool)
    ways: list[Callable[[], Iterable[object]]] = [
        lambda: torch.max(x, 0),
        lambda: torch.sort(x, 1, descending=True),
        lambda: torch.native_layer_norm(x.float(), [4], None, None, 1e-5),
        lambda: torch._foreach_add([x, x.t()], 1.0),
        lambda: torch.var_mean(x, 1),
    ]
    return list(rng.choice(ways)())


def joined(rng: random.Random, pool: Pool) -> object:
    one, other = square(rng, pool), square(rng, pool)
    ways: list[Callable[[], object]] = [
        lambda: torch.cat([one.float(), other.float()]),
        lambda: torch.stack([one.float(), one.float()]),
        lambda: one[torch.tensor([1, 0, 3])],
        lambda: torch.where(one > 0, one, other),
    ]
    return rng.choice(ways)()


def drawn(rng: random.Random, pool: Pool) -> object:
    x = square(rng, pool)
    ways: list[Callable[[], object]] = [
        lambda: torch.native_dropout(x.float(), 0.5, True)[0],
        lambda: torch.rand(4, 4),
        lambda: torch.empty(3, 4).normal_(),
        lambda: torch.rand(2, 2, generator=torch.Generator().manual_seed(rng.randrange(99))),
        lambda: torch.randperm(5),
        lambda: torch.rrelu(x.float(), training=True),
    ]
    return rng.choice(ways)()


def written(rng: random.Random, pool: Pool) -> object:
    x = floats(rng, pool)
    if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
        return []
    if any(size and stride < x.shape[-1] for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True)):
        return []  # it may lie on itself
    which = rng.randrange(9)
    if which == 0:
        x.add_(1)
    elif which == 1:
        x.mul_(x.sum() if rng.random() < 0.5 else 0.5)
    elif which == 2:
        x.zero_()
    elif which == 3:
        x.copy_(torch.rand(x.shape))
    elif which == 4 and x.dim():
        x[:1] = 7
    elif which == 5:
        x.masked_fill_(x > 0.5, -1)
    elif which == 6:
        x.data.sub_(0.25)
    elif which == 7 and x.dim() and x.shape[0] > 1:
        x[1:].add_(x[:-1].clone())
    elif which == 8:
        torch.sin(x.clone(), out=x)
    return []


def given(rng: random.Random, pool: Pool) -> object:
    one, other = square(rng, pool), square(rng, pool)
    out = torch.empty(rng.choice([(4, 4), (0,)]), dtype=torch.promote_types(one.dtype, other.dtype))
    return torch.add(one, other, out=out)


def unwritten(rng: random.Random, pool: Pool) -> object:
    x = torch.empty(4, 4)
    x[: rng.randrange(1, 5)].fill_(1)
    if rng.random() < 0.5:
        x[rng.randrange(4) :].copy_(torch.rand(1, 4))
    if rng.random() < 0.5:
        x[:, rng.randrange(4)] = 3
    return [x] if bool(x.isfinite().all()) else [torch.ones(4, 4)]


def normalized(rng: random.Random, pool: Pool) -> object:
    x, mean, var = square(rng, pool).float(), torch.zeros(4), torch.ones(4)
    out = torch.batch_norm(x, None, None, mean, var, rng.random() < 0.7, 0.1, 1e-5, True)
    return [out, mean, var]


def secret(rng: random.Random, pool: Pool) -> object:
    """What no operator of the tape's has."""
    x = floats(rng, pool)
    which = rng.randrange(4)
    if which == 0:
        in_another_thread(lambda: (x.clone() if 0 in x.stride() else x).add_(1))
    elif which == 1:
        made: Pool = []
        in_another_thread(lambda: made.append(torch.ones(4, 4)))
        return made
    elif which == 2:
        return torch.ones(4, 4).unsqueeze(0).squeeze_(0)
    elif which == 3 and x.storage_offset() == 0 and x.is_contiguous():
        return x.detach().clone().resize_(2, 2)
    return []


def dropped(rng: random.Random, pool: Pool) -> object:
    if len(pool) > 4:
        del pool[rng.randrange(len(pool) - 1)]
    return []


MAKES: tuple[tuple[Make, int], ...] = (
    (view, 8),
    (pointwise, 6),
    (number, 6),
    (product, 4),
    (several, 4),
    (joined, 4),
    (drawn, 4),
    (written, 10),
    (given, 2),
    (unwritten, 1),
    (normalized, 2),
    (secret, 1),
    (dropped, 6),
)


def snapshot(tensor: Tensor) -> Tensor:
    """A copy on a storage of its own of the same size."""
    storage = tensor.untyped_storage().clone()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


@dataclass
class PlannedIteration:
    closure: Closure
    originals: list[Tensor]
    leaves: list[Tensor | None]


class Trial:
    """One program, and closures of what it has at some moments."""

    def __init__(self, recorder: Recorder, rng: random.Random, counts: Counter[str]) -> None:
        self.recorder = recorder
        self.rng = rng
        self.counts = counts
        self.pool: Pool = [torch.randn(4, 4), torch.randn(4, 4).double(), torch.randn(3, 4)]
        self.made: list[PlannedIteration] = []
        self.promised: dict[tuple[int, int], Tensor] = {}
        self.stops: Stops | None = None

    def run(self) -> None:
        self.recorder.begin(states=True)
        self.stops = self.recorder.stops()
        makes, weights = zip(*MAKES, strict=True)
        for _ in range(40):
            try:
                made = self.rng.choices(makes, weights)[0](self.rng, self.pool)
            except (RuntimeError, IndexError):
                made = []  # it raised in the middle
            self.pool += made if isinstance(made, list) else [made]
            if self.rng.random() < 0.3:
                with self.recorder.untracked():
                    self.look()
        tape = self.recorder.end()
        assert tape is not None and tape.broken is None
        targets = [pick(self.rng, self.pool)]
        self.note(tape.closure(targets), [snapshot(each) for each in targets])
        for each in self.made:
            self.check(each)

    def look(self) -> None:
        assert self.stops is not None
        which = self.rng.random()
        if which < 0.3:
            promised = pick(self.rng, self.pool)
            if (key := self.stops.add(promised)) is not None:
                self.promised[key] = self.bytes_of(promised)
        elif which < 0.85:
            targets = [pick(self.rng, self.pool) for _ in range(self.rng.randrange(1, 4))]
            originals = [snapshot(each) for each in targets]
            self.note(self.recorder.closure(targets, self.rng.choice([None, self.stops])), originals)
        elif self.made:
            self.check(self.rng.choice(self.made))

    def note(self, found: Closure | Refused, originals: list[Tensor]) -> None:
        self.counts["refused" if isinstance(found, Refused) else "found"] += 1
        if isinstance(found, Refused):
            self.counts[f"refused: {found.reason.partition(': ')[2] or found.reason}"] += 1
        if isinstance(found, Closure):
            held = [self.promised.get((each.storage, each.state)) for each in found.leaves]
            self.made.append(PlannedIteration(found, originals, held))

    def check(self, made: PlannedIteration) -> None:
        """Each run makes the same, or raises."""
        before = torch.get_rng_state()
        leaves = None if self.rng.random() < 0.5 else made.leaves
        try:
            found = made.closure.run(leaves, poison=self.rng.choice([None, 0x3F]))
        except Differs as differs:
            self.counts[str(differs)] += 1
            assert made.closure.is_stale or "was released" in str(differs), differs
            found = []
        self.counts["made"] += bool(found)
        assert torch.equal(torch.get_rng_state(), before)
        for one, other in zip(found, made.originals, strict=bool(found)):
            assert self.recorder._native.is_same(one, other), made.closure.names

    def bytes_of(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage().clone()
        whole = torch.empty(0, dtype=torch.uint8).set_(storage)
        room = torch.zeros(whole.numel() + 600, dtype=torch.uint8)
        begin = -room.data_ptr() % 256 + 256
        room[begin : begin + whole.numel()] = whole
        return room[begin : begin + whole.numel()]


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_random_program_s_values_are_made_again_or_refused(recorder: Recorder, seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    counts: Counter[str] = Counter()
    for _ in range(150):
        Trial(recorder, rng, counts).run()
        if recorder.is_recording:
            recorder.end()
    print(counts)
    assert counts["made"] > 200
