"""What is done with every tensor, by the C++ part of the hooks."""

from __future__ import annotations

import gc
import random
import sys
import time
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.unit.natively import built
from torch_tiers.migrator.recording.storages import Known
from torch_tiers.migrator.saved.actions import Moved
from torch_tiers.migrator.saved.tensors import HookTensors
from torch_tiers.migrator.streams.pieces import SLOT

SWEEP, NEAR = 4096, 64  # `kSweep` and `kNear` of `storages.h`


@pytest.fixture(scope="module")
def tensors() -> HookTensors:
    return built()


def moved(tensors: HookTensors, tensor: Tensor, low: int = 0, nbytes: int = 0) -> Moved:
    return tensors.Moved(tensor, "mover", tensors.Saved("group", tensor, low, nbytes), object(), None, None)


# ------------------------------------------------------------------------------------------------ storages


def test_tensors_on_one_storage_are_one(tensors: HookTensors) -> None:
    storages, x = tensors.Storages(), torch.zeros(8, 8)
    assert storages.find(x) is storages.find(x.t()) is storages.find(x[1:])


def test_another_version_is_other_content(tensors: HookTensors) -> None:
    storages, x = tensors.Storages(), torch.zeros(8)
    before = storages.find(x)
    x.add_(1)
    after = storages.find(x)
    assert after is not before
    assert (before.ident, after.ident) == (0, 1)
    assert before.cdata == after.cdata == x.untyped_storage()._cdata


def fused(*, graph: bool = False) -> list[Tensor]:
    """The interleaved parts of one projection, each with a version counter of its own, as inductor hands them out."""
    projection = torch.zeros(16, 24, requires_grad=graph) * 1
    return list(projection.unsafe_chunk(3, dim=1))


def test_parts_of_a_buffer_that_count_for_themselves_need_it_once(tensors: HookTensors) -> None:
    storages, (q, k, v) = tensors.Storages(), fused()
    known = storages.find(q)
    assert storages.find(k) is storages.find(v) is known
    assert (known.low, known.high) == (0, q.untyped_storage().nbytes())
    known.saved = tensors.Saved("group", q, known.low, known.high)  # type: ignore[arg-type]
    assert storages.find(k) is known


def test_parts_with_a_graph_are_told_apart(tensors: HookTensors) -> None:
    """Each may be recomputed, by a replay that says nothing of the others."""
    storages, (q, k, _) = tensors.Storages(), fused(graph=True)
    assert storages.find(k) is not storages.find(q)


def test_a_part_that_was_changed_is_another(tensors: HookTensors) -> None:
    storages, (q, k, v) = tensors.Storages(), fused()
    known = storages.find(q)
    k.add_(1)
    assert storages.find(k) is not known
    assert storages.find(v) is known


def test_a_part_of_what_a_replay_makes_is_another(tensors: HookTensors) -> None:
    """It would be made as it was when it was dropped, whatever became of it since."""
    storages, (q, k, _) = tensors.Storages(), fused()
    known = storages.find(q)
    known.made = weakref.ref(Group())  # type: ignore[assignment]
    assert storages.find(k) is not known
    assert storages.find(q) is known


def test_a_part_of_what_has_left_is_another(tensors: HookTensors) -> None:
    """By way of `.data` the memory may be other than what has left, and no counter tells."""
    storages, (q, k, _) = tensors.Storages(), fused()
    known = storages.find(q)
    known.saved = tensors.Saved("group", q, known.low, known.high)  # type: ignore[arg-type]
    tensors.arrange([known.saved])
    assert storages.find(k) is not known
    assert storages.find(q) is known


def test_neighbours_without_gaps_move_alone(tensors: HookTensors) -> None:
    storages, (a, b) = tensors.Storages(), torch.zeros(2 * SLOT, dtype=torch.uint8).unsafe_chunk(2)
    spans = [(known.low, known.high) for known in (storages.find(a), storages.find(b))]
    assert spans == [(0, SLOT), (SLOT, 2 * SLOT)]


def test_what_shares_memory_with_one_that_is_gone_is_another(tensors: HookTensors) -> None:
    storages, x = tensors.Storages(), torch.zeros(8)
    other = x.data
    known = storages.find(other)
    del other
    assert storages.find(x) is not known


def test_a_storage_at_the_address_of_a_freed_one_is_another(tensors: HookTensors) -> None:
    storages = tensors.Storages()
    seen = []
    for _ in range(50):  # the allocators hand out the same addresses again and again
        seen.append(storages.find(torch.zeros(4096)).ident)
    assert len(set(seen)) == 50


def test_it_keeps_no_memory_alive(tensors: HookTensors) -> None:
    storages, x = tensors.Storages(), torch.zeros(4096)
    known = storages.find(x)
    assert not known.freed()
    del x
    assert known.freed()


@pytest.mark.parametrize(
    ("tensor", "span"),
    [
        (torch.zeros(100_000, dtype=torch.uint8)[2000:3000], (2000 - 2000 % SLOT, 3000)),
        (torch.zeros(1000, dtype=torch.uint8)[500:], (0, 1000)),
        (torch.zeros(1).expand(1000), (0, 4)),
    ],
    ids=["its own bytes if it is a small part", "all if it is half", "no more than all if it is expanded"],
)
def test_a_tensor_needs_of_its_storage(tensors: HookTensors, tensor: Tensor, span: tuple[int, int]) -> None:
    known = tensors.Storages().find(tensor)
    assert (known.low, known.high) == span


def test_a_part_of_what_is_known_is_known_and_the_whole_is_more(tensors: HookTensors) -> None:
    storages, x = tensors.Storages(), torch.zeros(100_000, dtype=torch.uint8)
    known = storages.find(x[2000:3000])
    assert storages.find(x[2048:2500]) is known
    assert storages.find(x) is not known


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.lists(st.integers(1, 4), min_size=0, max_size=3),
    stride=st.lists(st.integers(0, 200), min_size=3, max_size=3),
    offset=st.integers(0, 5000),
    dtype=st.sampled_from([torch.bool, torch.bfloat16, torch.float32, torch.complex128]),
)
def test_no_byte_of_a_tensor_is_left_out_and_it_comes_back_the_same(
    tensors: HookTensors, size: list[int], stride: list[int], offset: int, dtype: torch.dtype
) -> None:
    base = torch.arange(8000).to(dtype)
    view = base.as_strided(size, stride[: len(size)], offset)
    known = tensors.Storages().find(view)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=False))
    assert 0 <= known.low <= offset * view.itemsize
    assert (last + 1) * view.itemsize <= known.high <= base.untyped_storage().nbytes()
    assert known.low % SLOT == 0

    entry = moved(tensors, view, known.low, known.high - known.low)
    entry.saved.offset = 3 * SLOT
    buffer = torch.zeros(3 * SLOT + entry.saved.nbytes, dtype=torch.uint8)
    buffer[3 * SLOT :] = torch.empty(0, dtype=torch.uint8).set_(base.untyped_storage())[known.low : known.high]
    tensors.release([entry.saved])
    back = entry.view(buffer)
    assert torch.equal(back, view)
    assert (back.dtype, back.size(), back.stride()) == (view.dtype, view.size(), view.stride())


def test_storages_without_backward_do_not_pile_up(tensors: HookTensors) -> None:
    storages, alive = tensors.Storages(), torch.zeros(8)
    known = storages.find(alive)
    for _ in range(3 * SWEEP):
        storages.find(torch.zeros(8))
    assert storages.find(alive) is known


# ------------------------------------------------------------------------------------------------ memory_of


class Own(Tensor):
    """A program's own kind of tensor."""


def test_versions_that_are_gone_do_not_pile_up(tensors: HookTensors) -> None:
    """An input that is filled anew in every step: 16,000 steps without backward made each search 0.3 ms long."""
    storages, static, other = tensors.Storages(), torch.zeros(64), torch.zeros(64)
    beside = static.detach()  # on the same memory, with a counter of its own
    first, same = storages.find(static), storages.find(beside.data)
    entries = sum(type(each).__name__ == "Known" for each in gc.get_objects())
    del first
    for _ in range(100):
        static.copy_(other)
        last = storages.find(static)
    assert storages.find(static) is last
    assert sum(type(each).__name__ == "Known" for each in gc.get_objects()) <= entries + 1
    assert same.cdata == last.cdata


def test_thousands_of_slices_of_one_storage_are_found_in_no_time(tensors: HookTensors) -> None:
    """Each looked at all before it: 8,000 rows of a batch took a forward of 0.4 s 11."""
    storages, rows = tensors.Storages(), torch.zeros(8000, 1024)
    slices = [rows[k].data for k in range(len(rows))]
    begin = time.perf_counter()
    found = [storages.find(one) for one in slices]
    assert time.perf_counter() - begin < 3
    assert len({known.ident for known in found}) == len(slices)
    assert storages.find(slices[-1]) is found[-1]


def test_what_may_move_is_told_by_its_storage(tensors: HookTensors) -> None:
    x = torch.zeros(64)
    assert tensors.memory_of(x, 256) == tensors.memory_of(x[3:], 256) == x.untyped_storage()._cdata
    assert not tensors.memory_of(x, 257)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(64, 0),
        torch.zeros(64).to_sparse(),
        torch.zeros(64).as_subclass(Own),
        nn.Parameter(torch.zeros(64)),
        nn.Parameter(torch.zeros(64, 64)).t(),
        torch.zeros(64, dtype=torch.complex64).conj(),
        torch.zeros(64, dtype=torch.complex64).conj().imag,
        torch._efficientzerotensor(64),
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
    ],
    ids=["empty", "sparse", "subclass", "parameter", "transposed", "conj", "neg", "zero", "nested"],
)
def test_what_is_more_than_memory_or_a_parameter_s_may_not(tensors: HookTensors, tensor: Tensor) -> None:
    assert not tensors.memory_of(tensor, 0)


def test_what_a_function_transform_wraps_may_not(tensors: HookTensors) -> None:
    seen: list[int] = []

    def f(x: Tensor) -> Tensor:
        seen.append(tensors.memory_of(x, 0))
        return x.sum()

    torch.func.grad(f)(torch.zeros(64))
    torch.func.vmap(f)(torch.zeros(4, 64))
    assert seen == [0, 0]


# -------------------------------------------------------------------------------------------- saved and moved


def test_members_lie_one_after_the_other_as_they_were_saved(tensors: HookTensors) -> None:
    sizes = [700, 4 * SLOT + 1, 512, 1]
    memory = [torch.zeros(8 * SLOT, dtype=torch.uint8) for _ in sizes]
    members = [tensors.Saved("group", x, 512, nbytes) for x, nbytes in zip(memory, sizes, strict=True)]
    assert tensors.arrange(members) == 1024 + 5 * SLOT + 512 + 512
    assert [saved.nbytes for saved in members] == sizes
    assert [saved.offset for saved in members] == [0, 1024, 1024 + 5 * SLOT, 1536 + 5 * SLOT]
    assert list(memoryview(tensors.spans(members, 1 << 40)).cast("Q")) == [
        number
        for saved, x in zip(members, memory, strict=True)
        for number in ((1 << 40) + saved.offset, x.data_ptr() + 512, saved.nbytes)
    ]


def test_of_no_members_nothing_leaves(tensors: HookTensors) -> None:
    assert (tensors.arrange([]), tensors.spans([], 0)) == (0, b"")


def test_what_is_released_leaves_memory_and_still_tells_of_changes(tensors: HookTensors) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    entry, storage = moved(tensors, x), weakref.ref(x.untyped_storage())
    assert not entry.changed()
    assert torch.equal(entry.view(None), x)
    tensors.release([entry.saved])
    assert entry.saved.alias.numel() == 0
    assert entry.saved.alias.dtype == torch.float32
    x.add_(1)
    assert entry.changed()
    del x
    gc.collect()
    assert storage() is None


def test_each_of_several_on_one_memory_tells_of_its_own_changes(tensors: HookTensors) -> None:
    q, k, _ = fused()
    first = moved(tensors, q)
    second = tensors.Moved(k, "mover", first.saved, object(), None, None)
    k.add_(1)
    assert (first.changed(), second.changed()) == (False, True)
    assert second.view(None)._version == k._version == second.version + 1
    assert torch.equal(second.view(None), k)


def test_a_tensor_that_comes_back_shares_the_version_counter(tensors: HookTensors) -> None:
    x = torch.arange(6.0)
    entry = moved(tensors, x)
    entry.saved.offset = 0
    back = entry.view(torch.zeros(24, dtype=torch.uint8))
    assert not back.requires_grad
    assert back._version == x._version
    back.add_(1)
    assert entry.changed()
    assert torch.equal(x, torch.arange(6.0))


def test_what_was_packed_tells_what_it_was(tensors: HookTensors) -> None:
    x = torch.zeros(4, 6, dtype=torch.bfloat16).t()
    entry = moved(tensors, x)
    assert (entry.dtype, entry.size) == (torch.bfloat16, torch.Size([6, 4]))
    assert (entry.mover, entry.go, entry.record, entry.was_used) == ("mover", None, None, False)
    entry.was_used = True
    assert entry.was_used
    assert weakref.ref(entry)() is entry


def test_another_type_of_tensor_on_the_same_memory_comes_back_as_what_it_was(tensors: HookTensors) -> None:
    x = torch.randn(8)
    entry = tensors.Moved(x.view(torch.int32), None, tensors.Saved(None, x, 0, 32), None, None, None)
    assert torch.equal(entry.view(None), x.view(torch.int32))


def test_a_view_lies_on_other_memory_and_shares_the_version_counter(tensors: HookTensors) -> None:
    """As a dropped tensor does, of what was made again for all on its storage."""
    x = torch.arange(6.0)
    counter, whole = tensors.counter(x), torch.arange(6.0, 12.0)
    assert (counter.numel(), counter._version) == (0, x._version)
    view = tensors.view(counter, whole, torch.int32, torch.Size([2, 2]), (2, 1), 1)
    assert torch.equal(view, whole.view(torch.int32)[1:5].view(2, 2))
    assert view.data_ptr() == whole.data_ptr() + 4 and not view.requires_grad
    x.add_(1)
    assert view._version == counter._version == x._version
    with pytest.raises(TypeError, match="view"):
        tensors.view(counter, whole, torch.int32)  # type: ignore[call-arg]


def test_what_autograd_saves_comes_back_with_its_graph(tensors: HookTensors) -> None:
    x = torch.randn(16, requires_grad=True)
    packed: list[Any] = []

    def pack(tensor: Tensor) -> Any:
        packed.append(moved(tensors, tensor))
        packed[-1].saved.offset = 0
        return packed[-1]

    def unpack(entry: Any) -> Tensor:
        return entry.view(buffers[packed.index(entry)])

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = (x * x).exp()
    buffers = [entry.view(None).detach().clone().view(torch.uint8) for entry in packed]
    tensors.release([entry.saved for entry in packed])
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert torch.equal(grad, (x * x).exp() * 2 * x)
    (again,) = torch.autograd.grad(grad.sum(), x)
    torch.testing.assert_close(again, (2 + 4 * x * x) * (x * x).exp())


def test_a_collection_in_the_midst_of_a_search_may_search_itself(tensors: HookTensors) -> None:
    """As a finalizer does that saves tensors."""
    storages, x = tensors.Storages(), torch.zeros(8)
    storages.find(x)
    x.add_(1)

    def search(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            storages.find(x)

    thresholds = gc.get_threshold()
    gc.callbacks.append(search)
    gc.set_threshold(1)
    try:
        known = storages.find(x)
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(search)
    assert known.cdata == storages.find(x).cdata == x.untyped_storage()._cdata
    gc.collect()


class Group:
    """Refers to its members, and they to it."""

    members: list[Any]


def test_a_saved_one_always_has_an_alias(tensors: HookTensors) -> None:
    saved = moved(tensors, torch.zeros(8)).saved
    with pytest.raises(TypeError, match="always an alias"):
        del saved.alias
    with pytest.raises(TypeError, match="a tensor is wanted"):
        tensors.Saved(saved, "no tensor", 0, 0)  # type: ignore[arg-type]


def test_the_module_takes_no_name_of_the_program_s(tensors: HookTensors) -> None:
    assert "tensors" not in sys.modules


def test_nothing_leaks_and_cycles_are_collected(tensors: HookTensors) -> None:
    group = Group()
    x = torch.zeros(1024)
    storages = tensors.Storages()
    known = storages.find(x)
    known.saved = tensors.Saved(group, x, 0, 4096)
    group.members = [known.saved]
    claim, record = Group(), Group()
    entry: Any = tensors.Moved(x, group, known.saved, claim, None, record)
    record.members = [entry]  # a replay of the iteration that is recorded
    dead = [weakref.ref(one) for one in (group, claim, record, entry, x.untyped_storage())]
    del group, x, storages, known, claim, record, entry
    gc.collect()
    assert [ref() for ref in dead] == [None] * 5


class _Found(NamedTuple):
    """What a search made, with what the next ones must go by."""

    known: Known
    version: int
    base: weakref.ref[Tensor]

    def is_beside(self, of: Tensor, tensor: Tensor) -> bool:
        has_left = self.known.saved is not None and self.known.saved.offset >= 0
        return tensor._base is None and not has_left and not (of.requires_grad or tensor.requires_grad)


class _Model:
    """Searches one after the other, and what each must find."""

    def __init__(self, tensors: HookTensors) -> None:
        self._storages = tensors.Storages()
        self._chains: dict[int, list[_Found]] = {}  # by storage, the last first
        self._count = 0

    def find(self, tensor: Tensor) -> Known:
        found, storage = self._storages.find(tensor), tensor.untyped_storage()
        base, version = tensor if tensor._base is None else tensor._base, tensor._version
        low, high = self._reach(tensor, storage.nbytes())
        chain = self._chains.setdefault(storage._cdata, [])
        same = beside = None
        for entry in chain[:NEAR]:
            of = entry.base()
            if entry.version != version or entry.known.low > low or high > entry.known.high:
                continue
            if of is base:
                same = same or entry
            elif of is not None and entry.is_beside(of, tensor):
                beside = beside or entry
        if same or beside:
            assert found is (same or beside).known  # type: ignore[union-attr]
            return found
        assert (found.ident, found.low, found.high, found.cdata) == (self._count, low, high, storage._cdata)
        self._count += 1
        current = [entry for entry in chain[:NEAR] if self._is_current(entry, base, version)]
        self._chains[storage._cdata] = [_Found(found, version, weakref.ref(base)), *current, *chain[NEAR:]]
        return found

    @staticmethod
    def _is_current(entry: _Found, base: Tensor, version: int) -> bool:
        of = entry.base()
        return of is not None and (of is not base or entry.version == version)

    @staticmethod
    def _reach(tensor: Tensor, nbytes: int) -> tuple[int, int]:
        size = tensor.itemsize
        low = int(tensor.storage_offset()) * size
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        high = low + (1 + last) * size
        is_half = 2 * (high - low) >= nbytes and (tensor._base is not None or tensor.nbytes < high - low)
        return (0, nbytes) if tensor.nbytes == nbytes or is_half else (low - low % SLOT, high)


def test_random_programs_find_what_they_must(tensors: HookTensors, seed: int) -> None:
    rng, model = random.Random(seed), _Model(tensors)
    alive: list[Tensor] = []
    for _ in range(3000):
        kind = rng.randrange(8)
        if kind == 0 or not alive:
            alive.append(torch.zeros(rng.randrange(1, 3000), requires_grad=rng.random() < 0.2) * 1)
        elif kind == 1:
            alive.append(rng.choice(alive)[rng.randrange(3) :: rng.randrange(1, 4)])
        elif kind == 2:
            alive.pop(rng.randrange(len(alive)))
        elif kind == 3:
            rng.choice(alive).add_(1)
        elif kind == 4:
            alive.append(rng.choice(alive).data)
        elif kind == 5:
            alive += torch.zeros(4, 3 * rng.randrange(1, 500)).unsafe_chunk(3, dim=rng.randrange(2))
        one = rng.choice(alive) if alive else torch.zeros(3)
        if one.numel():
            known, storage = model.find(one), one.untyped_storage()
            if known.saved is None and rng.random() < 0.3:
                known.saved = tensors.Saved(None, one, known.low, known.high - known.low)  # type: ignore[arg-type]
            if known.saved is not None and rng.random() < 0.2:
                known.saved.offset = 0
            assert tensors.memory_of(one, 64) == (storage._cdata if storage.nbytes() >= 64 else 0)
