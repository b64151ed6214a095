from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from migrator import storages as module
from migrator.lanes import SLOT
from migrator.storages import Known, Storages


def find(storages: Storages, tensor: torch.Tensor) -> Known:
    return storages.find(tensor, tensor.untyped_storage(), tensor._version)


def test_tensors_on_one_storage_are_one() -> None:
    storages, x = Storages(), torch.zeros(8, 8)
    assert find(storages, x) is find(storages, x.t()) is find(storages, x[1:])


def test_another_version_is_other_content() -> None:
    storages, x = Storages(), torch.zeros(8)
    before = find(storages, x)
    x.add_(1)
    assert find(storages, x) is not before


def test_a_storage_at_the_address_of_a_freed_one_is_another() -> None:
    storages = Storages()
    seen = []
    for _ in range(50):  # the allocators hand out the same addresses again and again
        seen.append(find(storages, torch.zeros(4096)).ident)
    assert len(set(seen)) == 50


def test_it_keeps_no_memory_alive() -> None:
    storages, x = Storages(), torch.zeros(4096)
    known = find(storages, x)
    assert not known.freed()
    del x
    assert known.freed()


def test_a_small_part_needs_only_its_own_bytes() -> None:
    x = torch.zeros(100_000, dtype=torch.uint8)
    known = find(Storages(), x[2000:3000])
    assert (known.low, known.high) == (2000 - 2000 % SLOT, 3000)


def test_half_a_storage_needs_all_of_it() -> None:
    known = find(Storages(), torch.zeros(1000, dtype=torch.uint8)[500:])
    assert (known.low, known.high) == (0, 1000)


def test_a_part_of_what_is_known_is_known() -> None:
    storages, x = Storages(), torch.zeros(100_000, dtype=torch.uint8)
    assert find(storages, x[2000:3000]) is find(storages, x[2048:2500])


def test_the_whole_is_more_than_a_known_part() -> None:
    storages, x = Storages(), torch.zeros(100_000, dtype=torch.uint8)
    assert find(storages, x[2000:3000]) is not find(storages, x)


def test_an_expanded_scalar_needs_its_storage_only() -> None:
    known = find(Storages(), torch.zeros(1).expand(1000))
    assert (known.low, known.high) == (0, 4)


@given(
    size=st.lists(st.integers(1, 4), min_size=0, max_size=3),
    stride=st.lists(st.integers(0, 200), min_size=3, max_size=3),
    offset=st.integers(0, 5000),
    dtype=st.sampled_from([torch.bool, torch.bfloat16, torch.float32, torch.complex128]),
)
def test_no_byte_of_a_tensor_is_left_out(size: list[int], stride: list[int], offset: int, dtype: torch.dtype) -> None:
    base = torch.empty(8000, dtype=dtype)
    view = base.as_strided(size, stride[: len(size)], offset)
    known = find(Storages(), view)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=False))
    assert 0 <= known.low <= offset * view.itemsize
    assert (last + 1) * view.itemsize <= known.high <= base.untyped_storage().nbytes()
    assert known.low % SLOT == 0


def test_storages_without_backward_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SWEEP", 8)
    storages, alive = Storages(), torch.zeros(8)
    known = find(storages, alive)
    for _ in range(100):
        find(storages, torch.zeros(8))
    assert len(storages._known) <= 9
    assert find(storages, alive) is known
