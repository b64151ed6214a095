"""The kernel that normalises rows again, against PyTorch's own: the same bits, in all it takes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.unit.migrator.recompute.test_formulas import Packer
from torch_tiers.migrator.recompute import fused_layer_norm as again
from torch_tiers.migrator.recompute.origins import note_epsilon

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")

BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
ROWS = [1, 15, 16, 1000, 70_000]
"""The last are more blocks of rows than the second dimension of a grid has room for."""


def given(rows: int, length: int, dtype: torch.dtype, *, centred: bool = True) -> tuple[Tensor, again.Rows]:
    """What PyTorch makes of random rows, and what our kernel takes; one row has a number that is none.

    Rows that are not centred are only divided by the root of their mean square.
    """
    generator = torch.Generator("cuda").manual_seed(1)
    x, weight, bias = (
        torch.randn(shape, device="cuda", generator=generator).to(dtype)
        for shape in ((rows, length), (length,), (length,))
    )
    x[0, 0] = torch.nan
    if not centred:
        made, inverse = torch._fused_rms_norm(x, [length], weight, 1e-5)
        return made, (x, weight, None, None, inverse)
    made, mean, inverse = torch.native_layer_norm(x, [length], weight, bias, 1e-5)
    return made, (x, weight, bias, mean, inverse)


@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize("length", [16, 768, 1024, 2048, 5120])
@pytest.mark.parametrize("centred", [True, False], ids=["layer norm", "rms norm"])
def test_gives_the_bits_of_the_kernel_that_it_replaces(dtype: torch.dtype, length: int, *, centred: bool) -> None:
    assert again._exact(torch.device("cuda", 0), dtype, length, centred=centred)
    for rows in ROWS:
        expected, tensors = given(rows, length, dtype, centred=centred)
        made = again._at_once(tensors, length)
        assert torch.equal(made.isnan(), expected.isnan())
        assert torch.equal(made.nan_to_num().view(BITS[dtype]), expected.nan_to_num().view(BITS[dtype]))


def test_rows_that_are_not_aligned_are_pytorch_s() -> None:
    """Its kernel is another there, which rounds in another order."""
    _, (_, weight, bias, mean, inverse) = given(8, 1024, torch.bfloat16)
    x = torch.randn(8 * 1024 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(8, 1024)
    expected, mean, inverse = torch.native_layer_norm(x, [1024], weight, bias, 1e-5)
    assert not again._fits((x, weight, bias, mean, inverse), 1024)
    assert torch.equal(again.layer_norm(x, weight, bias, mean, inverse, [1024], 1e-5), expected)


@pytest.mark.parametrize("affine", [True, False])
def test_rms_norms_are_made_again_from_what_their_nodes_keep(affine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel where there is a weight: without one PyTorch's does it."""
    assert again._exact(torch.device("cuda", 0), torch.bfloat16, 1024, centred=False)  # which calls it, too
    at_once, calls = again._at_once, list[int]()

    def counted(rows: again.Rows, length: int) -> Tensor:
        calls.append(length)
        return at_once(rows, length)

    monkeypatch.setattr(again, "_at_once", counted)
    packer = Packer()
    norm = nn.RMSNorm(1024, eps=1e-3, elementwise_affine=affine, device="cuda", dtype=torch.bfloat16)
    if affine:
        nn.init.normal_(norm.weight)
    with packer.on():
        made = norm(torch.randn(6, 9, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True) * 3)
    assert made.grad_fn is not None
    assert made.grad_fn.name() == "FusedRmsNormBackward0"
    note_epsilon(norm, made)
    made_again = packer.again(made)
    assert made_again is not None
    assert torch.equal(made_again.view(torch.int16), made.detach().view(torch.int16))
    assert calls == ([1024] if affine else [])
