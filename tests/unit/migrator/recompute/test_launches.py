"""The short way to launch a kernel: for arguments of one specialisation only, and given up where it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_tiers.migrator.recompute.launches import Launcher, is_aligned

GRID = (4, 1, 1)


class Compiled:
    """What a kernel has compiled; launched by itself it says so."""

    def __init__(self, launches: list[str], fail: Callable[[], None]) -> None:
        self._launches = launches
        self._fail = fail

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any) -> None:
            self._fail()
            self._launches.append(f"short {arguments[0]} {grid[0]}")

        return launch


class Kernel:
    """Stands in for a kernel of Triton's."""

    def __init__(self, fail: Callable[[], None] = lambda: None, returns: bool = True) -> None:
        self.launches: list[str] = []
        self._fail = fail
        self._returns = returns

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled | None]:
        def launch(*arguments: Any) -> Compiled | None:
            self.launches.append(f"long {arguments[0]} {grid[0]}")
            return Compiled(self.launches, self._fail) if self._returns else None

        return launch


def test_what_was_compiled_is_launched_for_the_same_specialisation_only() -> None:
    kernel = Kernel()
    launch = Launcher(kernel)
    for special, argument in [("a", 1), ("a", 2), ("b", 3), (None, 4), (None, 5), ("b", 6)]:
        launch(special, GRID, (argument,))
    assert kernel.launches == ["long 1 4", "short 2 4", "long 3 4", "long 4 4", "long 5 4", "short 6 4"]


def test_where_the_short_way_fails_it_is_given_up_for_good() -> None:
    def fail() -> None:
        raise TypeError("function takes exactly 18 arguments (22 given)")

    kernel = Kernel(fail)
    launch = Launcher(kernel)
    for argument in range(4):
        launch("a", GRID, (argument,))
    assert kernel.launches == [f"long {argument} 4" for argument in range(4)]


def test_a_kernel_that_returns_nothing_is_launched_the_long_way() -> None:
    """Triton's interpreter compiles nothing."""
    kernel = Kernel(returns=False)
    launch = Launcher(kernel)
    for argument in range(3):
        launch("a", GRID, (argument,))
    assert kernel.launches == [f"long {argument} 4" for argument in range(3)]


@pytest.mark.parametrize("number", [0, 1, 8, 24, 1 << 31, (1 << 31) - 8])
def test_only_multiples_of_16_of_32_bits_are_aligned(number: int) -> None:
    assert is_aligned((), 16, 4096)
    assert not is_aligned((), 16, number)


def test_a_pointer_that_is_no_multiple_of_16_is_seen() -> None:
    aligned = torch.empty(64, dtype=torch.bfloat16)
    assert is_aligned((aligned, aligned[8:]), 16)
    for first in (1, 2, 4, 7, 9):
        assert not is_aligned((aligned, aligned[first:]), 16)


def _arguments(channels: int) -> Iterator[tuple[tuple[Tensor, ...], int]]:
    """What the kernel may be given: types, alignments and numbers of rows of every kind."""
    for dtype, affine, first, rows in product(
        (torch.bfloat16, torch.float32), (torch.bfloat16, torch.float32), (0, 1, 8), (1, 3, 16, 4096, 1 << 31)
    ):
        x, y, out = (torch.empty(128, dtype=dtype)[: 64 + i] for i in range(3))
        weight, bias = (torch.empty(128, dtype=affine) for _ in range(2))
        mean, inverse = (torch.empty(128) for _ in range(2))
        for moved in range(3):
            tensors = [x, y, weight, bias, mean, inverse, out]
            tensors[moved * 2] = tensors[moved * 2][first:]
            yield tuple(tensors), rows


def test_one_short_way_is_one_specialisation_of_triton_s() -> None:
    """Seen with Triton's own look at the arguments, for an H100, in every version that has it where 3.6 does."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime import jit

    if not hasattr(jit, "create_function_from_signature"):
        pytest.skip("this version of Triton has another way to look at arguments")
    from torch_tiers.migrator.recompute.fused_kernel import _kernel, special

    look = jit.create_function_from_signature(
        _kernel.signature, _kernel.params, make_backend(GPUTarget("cuda", 90, 32))
    )
    specialisations: dict[Any, set[str]] = {}
    for channels in (1, 8, 16, 64, 100, 2048):
        for tensors, rows in _arguments(channels):
            _, found, _ = look(*tensors, rows, channels, True, True, 64, 64)
            specialisations.setdefault(special(tensors, rows, channels, (0, True, True)), set()).add(str(found))
    others = specialisations.pop(None)
    assert len(others) > 1
    assert len(specialisations) == 4  # by the types of what is normalised, and of weight and bias
    assert all(len(found) == 1 for found in specialisations.values())
    assert all(found.isdisjoint(others) for found in specialisations.values())
