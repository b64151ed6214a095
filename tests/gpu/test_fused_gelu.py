"""The kernel that makes a GELU again, against PyTorch's own: the same bits, for every number of bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.unit.migrator.recompute.test_formulas import Packer
from torch_tiers.migrator.recompute import fused_gelu as again

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")

APPROXIMATE = ["none", "tanh"]


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16)


def every_number() -> Tensor:
    return torch.arange(1 << 16, device="cuda").to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("approximate", APPROXIMATE)
@pytest.mark.parametrize("count", [16, 1008, 1024, 1040, (1 << 24) + 16])
def test_gives_the_bits_of_the_kernel_that_it_replaces(approximate: str, count: int) -> None:
    """Also for fewer numbers than a program looks at, and in memory that held others."""
    way = again._exact(torch.device("cuda", 0), approximate)
    assert way is not None
    x = every_number().repeat(-(-count // (1 << 16)))[:count].clone()
    assert torch.equal(bits(again._at_once(x, way)), bits(F.gelu(x, approximate=approximate)))


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("approximate", APPROXIMATE)
def test_gelus_are_made_again_by_it(filled: bool, approximate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where PyTorch fills the memory that it is asked for: then its own is faster."""
    assert again._exact(torch.device("cuda", 0), approximate) is not None  # which calls it, too
    at_once, calls = again._at_once, list[int]()

    def counted(x: Tensor, way: again.Coefficients) -> Tensor:
        calls.append(x.numel())
        return at_once(x, way)

    monkeypatch.setattr(again, "_at_once", counted)
    packer = Packer()
    with packer.on():
        made = F.gelu(torch.randn(64, 64, device="cuda", requires_grad=True).bfloat16(), approximate=approximate)
    torch.use_deterministic_algorithms(filled)
    try:
        made_again = packer.again(made)
    finally:
        torch.use_deterministic_algorithms(False)
    assert made_again is not None
    assert torch.equal(bits(made_again), bits(made.detach()))
    assert calls == ([] if filled else [64 * 64])


def test_an_error_function_that_is_never_off_has_a_polynomial_too() -> None:
    x = every_number()
    half, root = torch.tensor([0.5, 0.5**0.5], device="cuda").unbind()
    error = torch.erf((x.float() * root).double()).float()
    expected = (x.float() * half * (1 + error)).to(torch.bfloat16)
    made = again._at_once(x, again.WAYS["none"][-1])
    assert torch.equal(bits(made), bits(expected))


@pytest.mark.parametrize("approximate", APPROXIMATE)
@pytest.mark.parametrize("kind", ["float16", "float32", "not aligned", "not contiguous", "empty"])
def test_what_the_kernel_does_not_know_is_pytorch_s(approximate: str, kind: str) -> None:
    x = torch.randn(64, 64, device="cuda").to(torch.bfloat16)
    x = {
        "float16": x.to(torch.float16),
        "float32": x.float(),
        "not aligned": x.flatten()[1:-15],
        "not contiguous": x.t(),
        "empty": x[:0],
    }[kind]
    assert not again._fits(x)
    assert torch.equal(again.gelu(x, approximate), F.gelu(x, approximate=approximate))
