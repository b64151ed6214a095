"""Programs of random operators, views and writes: what a closure makes has the same bits, or there is none."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.unit.migrator.tape.records import (
    Form,
    Packed,
    bytes_of,
    has_the_bits_of,
    in_another_thread,
    is_whole,
    snapshot,
    storage_of,
)
from torch_tiers.migrator.tape.closure import Bound, Differs
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


class Elsewhere:
    """Stands for a tensor whose storage is copied somewhere into other memory."""

    def __init__(self, tensor: Tensor) -> None:
        storage = bytes_of(tensor)
        room = torch.zeros(storage.numel() + 600, dtype=torch.uint8)
        begin = -room.data_ptr() % 256 + 256
        room[begin : begin + storage.numel()] = storage
        form = Form.of(tensor)
        self.value = replace(form, offset=begin // tensor.itemsize + form.offset).on(room.untyped_storage())


@dataclass
class Found:
    closure: Bound
    originals: list[Tensor]


class Trial:
    """One program, and closures of what it has at some moments."""

    def __init__(self, recorder: Recorder, rng: random.Random, counts: Counter[str]) -> None:
        self.recorder = recorder
        self.rng = rng
        self.counts = counts
        self.pool: Pool = [torch.randn(4, 4), torch.randn(4, 4).double(), torch.randn(3, 4)]
        self.fixed = {storage_of(each) for each in self.pool} if rng.random() < 0.5 else None  # None: all there is
        self.made: list[Found] = []
        self.packed: list[Packed | Elsewhere] = []
        self.is_over = False

    def run(self) -> None:
        self.recorder.begin()
        self.packs = self.recorder.packs()
        makes, weights = zip(*MAKES, strict=True)
        for _ in range(40):
            try:
                made = self.rng.choices(makes, weights)[0](self.rng, self.pool)
            except (RuntimeError, IndexError):
                made = []  # it raised in the middle
            self.pool += made if isinstance(made, list) else [made]
            if self.rng.random() < 0.5:
                with self.recorder.untracked():
                    self.look()
        assert self.recorder.listed() is not None
        self.recorder.stop()
        self.is_over = True
        for each in self.made:
            self.check(each)

    def look(self) -> None:
        which = self.rng.random()
        if which < 0.3:
            tensor = pick(self.rng, self.pool)
            self.packed.append(self.rng.choice([Packed, Elsewhere])(tensor))
            self.packs.note(tensor, self.packed[-1], str(len(self.packed)))
        elif which < 0.85:
            tensor = pick(self.rng, self.pool)
            whole = tensor if tensor._base is None else tensor._base
            if is_whole(whole):
                self.find(whole)
        elif self.made:
            self.check(self.rng.choice(self.made))

    def find(self, target: Tensor) -> None:
        found = self.packs.find(
            target, self.recorder.settings(), lambda storage: self.fixed is None or storage in self.fixed
        )
        self.counts["refused" if found is None else "found"] += 1
        if found is None:
            return
        self.counts["begins with what was packed"] += bool(found.inputs)
        originals = [snapshot(target)]
        for before in self.made:
            if before.closure.last == found.last and found.also(before.closure):
                self.counts["joined"] += 1
                originals = [*before.originals, *originals]
                break
        self.made.append(Found(found, originals))

    def check(self, made: Found) -> None:
        """Each run makes the same, or raises."""
        before = torch.get_rng_state()
        try:
            found = made.closure.make([each.value for each in made.closure.inputs])
        except Differs as differs:
            self.counts[str(differs)] += 1
            assert made.closure.is_stale, differs
            found = []
        self.counts["made"] += bool(found)
        self.counts["made after the record"] += bool(found) and self.is_over
        assert torch.equal(torch.get_rng_state(), before)
        for one, other in zip(found, made.originals, strict=bool(found)):
            assert has_the_bits_of(one, other), made.closure.names


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_random_program_s_values_are_made_again_or_refused(recorder: Recorder, seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    counts: Counter[str] = Counter()
    for _ in range(300):
        Trial(recorder, rng, counts).run()
    print(counts)
    assert counts["made after the record"] > 500 and counts["begins with what was packed"] > 150
