"""What an operator does besides making its outputs is told from its schema."""

from __future__ import annotations

import pytest
import torch.distributed

from torch_tiers.migrator.tape.recorder import Recorder

NEVER, ALWAYS, IF_MASKED, IF_IT_COPIES = range(4)


@pytest.mark.parametrize(
    ("name", "overload", "written"),
    [
        ("aten::add", "Tensor", []),
        ("aten::add_", "Tensor", [0]),
        ("aten::add", "out", [3]),
        ("aten::t_", "", []),
        ("aten::set_", "source_Tensor", []),
        ("aten::record_stream", "", []),
        ("aten::native_batch_norm", "", [3, 4]),
        ("aten::_native_batch_norm_legit", "", [3, 4]),
        ("aten::rrelu_with_noise", "", [1]),
        ("aten::_foreach_add_", "List", [0]),
        ("aten::_fused_adamw_", "", [0, 2, 3, 4]),
    ],
)
def test_arguments_that_are_written(recorder: Recorder, name: str, overload: str, written: list[int]) -> None:
    found = recorder.effects(name, overload)[0]
    assert found == written or (name == "aten::_fused_adamw_" and set(written) <= set(found))


@pytest.mark.parametrize(
    ("name", "overload", "random"),
    [
        ("aten::native_dropout", "", True),
        ("aten::bernoulli_", "float", True),
        ("aten::rand", "", True),
        ("aten::_scaled_dot_product_flash_attention", "", True),
        ("aten::mul", "Tensor", False),
    ],
)
def test_who_may_draw_random_numbers(recorder: Recorder, name: str, overload: str, random: bool) -> None:
    assert recorder.effects(name, overload)[1] == random


@pytest.mark.parametrize(
    ("name", "overload", "waits"),
    [
        ("aten::_local_scalar_dense", "", ALWAYS),
        ("aten::nonzero", "", ALWAYS),
        ("aten::equal", "", ALWAYS),
        ("aten::masked_select", "", ALWAYS),
        ("aten::_unique2", "", ALWAYS),
        ("aten::index", "Tensor", IF_MASKED),
        ("aten::_index_put_impl_", "", IF_MASKED),
        ("aten::copy_", "", IF_IT_COPIES),
        ("aten::_to_copy", "", IF_IT_COPIES),
        ("aten::mm", "", NEVER),
    ],
)
def test_when_the_host_waits(recorder: Recorder, name: str, overload: str, waits: int) -> None:
    assert recorder.effects(name, overload)[3] == waits


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this PyTorch has no collectives")
@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("c10d::allreduce_", [0]),
        ("c10d::_allgather_base_", [0]),
        ("c10d::send", []),
        ("_c10d_functional::all_reduce", []),
        ("_c10d_functional::all_reduce_", [0]),
    ],
)
def test_collectives_write_what_they_receive(recorder: Recorder, name: str, written: list[int]) -> None:
    found, _, collective, _ = recorder.effects(name, "")
    assert collective and found == written
