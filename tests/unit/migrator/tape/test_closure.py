"""Which operators make a tensor again, from what, and when there is no telling."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from tests.unit.migrator.tape.records import (
    Taped,
    bytes_of,
    has_the_bits_of,
    in_another_thread,
    is_whole,
    made_of,
    short,
)
from torch_tiers.migrator.tape.closure import Bound, Differs
from torch_tiers.migrator.tape.recorder import Recorder


@pytest.fixture
def x() -> Tensor:
    """What was there before anything was recorded."""
    return torch.randn(4)


@pytest.fixture
def taped(recorder: Recorder, x: Tensor) -> Iterator[Taped]:
    """A record that goes on."""
    yield Taped(recorder)
    recorder.stop()


@pytest.fixture
def sine(taped: Taped, x: Tensor) -> Bound:
    """The closure of its sine."""
    return found(taped.find(x.sin()))


def found(closure: Bound | None) -> Bound:
    assert closure is not None
    return closure


# ------------------------------------------------------------------------------------- what is in it


def test_it_has_what_made_the_target_and_nothing_else(taped: Taped) -> None:
    x = torch.randn(3)
    y = x.sin()
    x.cos()
    y.exp()
    z = y.tan()
    closure = found(taped.find(z))
    assert short(closure) == ["randn", "sin", "tan"] and closure.last == 4
    taped.made_again(z)


def test_view_is_a_part_of_what_its_base_is(taped: Taped) -> None:
    x = torch.randn(4, 3).t()[1:].contiguous()
    y = x.view(2, 2, 2).transpose(0, 2)[1].unsqueeze(0).sin()
    assert short(taped.find(x)) == ["randn", "clone"]
    assert short(taped.find(y)) == ["randn", "clone", "sin"]
    taped.made_again(x, y)


def test_begins_with_what_was_there_before(recorder: Recorder) -> None:
    x, weight = torch.randn(3, 4), torch.randn(5, 4, requires_grad=True)
    taped = Taped(recorder)
    y = F.linear(x[1:], weight).relu()
    closure = found(taped.find(y, x, weight))
    assert taped.find(y, x) is None and taped.find(y, weight) is None, "the other one may be written unseen"
    recorder.stop()
    assert closure.inputs == () and torch.equal(*made_of(closure), y)


def test_goes_no_further_than_what_was_packed(taped: Taped) -> None:
    x = torch.randn(3)
    y = x.sin()
    packed = taped.note(y, "net:1")
    z = y.exp().mul(2)
    closure = found(taped.find(z))
    assert short(closure) == ["exp", "mul"]
    assert closure.inputs == (packed,) and closure.keys == ("net:1",)
    taped.made_again(z)


def test_what_was_packed_in_another_record_is_not_there(recorder: Recorder) -> None:
    before = Taped(recorder)
    recorder.stop()
    taped = Taped(recorder)
    x = torch.ones(2)
    before.note(x)
    y = x.sin()
    assert before.find(y) is None
    assert found(taped.find(y)).inputs == ()


def test_signature_tells_what_is_computed(taped: Taped) -> None:
    def signature(target: Tensor) -> int:
        return found(taped.find(target)).signature

    x, y = torch.ones(3), torch.ones(3)
    first = signature(x.mul(2).add(1))
    assert signature(y.mul(2).add(1)) == first
    assert signature(x.mul(3).add(1)) != first
    assert signature(x.mul(2).add(2)) != first
    assert signature(torch.ones(4).mul(2).add(1)) != first
    assert signature(x + y) != signature(x + x)
    assert signature((z := x.sin()) * z) != signature(x.sin() * x.sin())
    assert signature(torch.sort(x)[0]) != signature(torch.sort(x)[1])


def test_signature_is_the_same_however_many_other_operators_came_in_between(recorder: Recorder) -> None:
    """As in a program of many sizes. What was verified of a closure is known by its signature."""

    def signature() -> int:
        taped = Taped(recorder)
        made = found(taped.find(torch.ones(3).mul(2).add(1))).signature
        recorder.stop()
        return made

    first = signature()
    for size in range(3000):
        Taped(recorder)
        torch.ones(4 + size)
        recorder.stop()
    assert signature() == first


def test_record_keeps_no_memory(taped: Taped) -> None:
    x = torch.ones(100)
    y = x + 1
    dead, alive = (StorageWeakRef(each.untyped_storage()) for each in (x, y))
    del x
    assert dead.expired() and not alive.expired()
    del y
    assert alive.expired()


def test_address_that_is_used_again_is_another_storage(taped: Taped) -> None:
    for number in range(20):
        taped.made_again(torch.full((64,), number).sin())


# ------------------------------------------------------------------------------------- writes


def test_what_was_written_in_place_is_written_again(taped: Taped) -> None:
    x = torch.randn(4, 4)
    x[1].mul_(2)
    x.t()[0] = 3
    x.data.add_(1)
    x.relu_()
    x.masked_fill_(x > 2, 0.5)
    taped.made_again(x)
    assert {"mul_", "add_", "relu_", "masked_fill_"} <= set(short(taped.find(x)))


def test_value_is_made_as_it_was_before_each_write(taped: Taped) -> None:
    x = torch.randn(4)
    y = x.sin()
    first, one = y.clone(), found(taped.find(y))
    y.add_(1)
    second, other = y.clone(), found(taped.find(y))
    y.mul_(y[1:].sum()).add_(first)
    assert torch.equal(*made_of(one), first) and torch.equal(*made_of(other), second)
    taped.made_again(y, first, second)


def test_what_a_tensor_and_its_view_are_both_given_to_is_written_once(taped: Taped) -> None:
    x = torch.randn(4, 4)
    x.add_(x.t().clone())
    x[0].copy_(x[1])
    x.view(-1)[8:].mul_(x[:2].view(-1))
    taped.made_again(x)


def test_what_was_packed_is_not_written(recorder: Recorder) -> None:
    x = torch.randn(4)
    taped = Taped(recorder)
    kept = x.clone()
    packed = taped.note(kept)
    kept.add_(1)
    y = kept.sin()
    closure = found(taped.find(y))
    recorder.stop()
    before = packed.value.clone()
    for _ in range(2):
        assert torch.equal(*made_of(closure), y)
        assert torch.equal(packed.value, before)


def test_what_was_there_before_is_not_written(recorder: Recorder) -> None:
    x = torch.randn(4)
    taped = Taped(recorder)
    packed = taped.note(x)
    y = x.add_(1).sin()
    closure = found(taped.find(y))
    recorder.stop()
    assert short(closure) == ["add_", "sin"] and closure.inputs == (packed,)
    after, before = x.clone(), packed.value.clone()
    for _ in range(2):
        assert torch.equal(*made_of(closure), y)
        assert torch.equal(x, after) and torch.equal(packed.value, before)


def test_what_was_packed_and_written_since_is_not_taken_for_kept(taped: Taped) -> None:
    x = torch.randn(4)
    taped.note(x)
    y = x.sin()
    x.add_(1)
    closure = found(taped.find(y))
    with pytest.raises(Differs, match="written since"):
        closure.make([x])
    assert torch.equal(*made_of(closure), y)


def test_running_statistics_are_left_alone(recorder: Recorder) -> None:
    x, mean, variance = torch.randn(5, 3), torch.zeros(3), torch.ones(3)
    taped = Taped(recorder)
    y = F.batch_norm(x, mean, variance, training=True)
    after = mean.clone()
    closure = found(taped.find(y, x))
    assert taped.find(after) is None, "what it was made of is nowhere"
    recorder.stop()
    expected = mean.clone()
    assert torch.equal(*made_of(closure), y) and torch.equal(mean, expected)


def test_running_statistics_that_are_read_are_leaves(recorder: Recorder) -> None:
    x, mean, variance = torch.randn(5, 3), torch.zeros(3), torch.ones(3)
    taped = Taped(recorder)
    y = F.batch_norm(x, mean, variance, training=False)
    closure = found(taped.find(y, x, mean, variance))
    assert taped.find(y, x, mean) is None
    recorder.stop()
    assert torch.equal(*made_of(closure), y)


@pytest.mark.parametrize("who", [lambda write: write(), in_another_thread], ids=["this thread", "another"])
def test_leaf_that_is_written_later_is_none(taped: Taped, x: Tensor, who: Callable[..., None]) -> None:
    y = x.sin()
    who(lambda: x.add_(1))
    assert taped.find(y) is None
    z = x.cos()
    who(lambda: x.data.add_(1))
    assert taped.find(z) is None or who is in_another_thread  # whose write nothing tells of


def test_what_was_there_before_a_write_is_lost(taped: Taped, x: Tensor) -> None:
    x.add_(1)
    y = x.sin()
    assert taped.find(y) is None
    packed = taped.note(x)
    z = x.sin().exp()
    closure = found(taped.find(z))
    assert short(closure) == ["sin", "exp"] and closure.inputs == (packed,)
    taped.made_again(z)


def test_numbers_of_python_s_are_kept(taped: Taped, x: Tensor) -> None:
    table = torch.zeros(4, 4)
    table[1] = 3
    y = table[torch.tensor([1, 0])] * torch.tensor(0.5)
    closure = found(taped.find(y, x))
    assert closure.inputs == ()
    taped.made_again(y)
    z = table[torch.tensor([1, 2])] * torch.tensor(0.5)
    assert found(taped.find(z, x)).signature != closure.signature


def test_number_of_python_s_that_was_changed_is_none_that_is_kept(taped: Taped) -> None:
    x = torch.tensor([1.0, 0.0])
    in_another_thread(x.zero_)
    y = x.sin()
    del x
    assert taped.find(y) is None


def test_leaf_that_is_gone_is_none(recorder: Recorder) -> None:
    x = torch.randn(4)
    taped = Taped(recorder)
    y = x.sin()
    del x
    assert taped.find(y) is None


# ------------------------------------------------------------------------------------- operators of all kinds


def fused_adamw(x: Tensor) -> list[Tensor]:
    state = [x.sin(), x.cos(), x.exp(), x.square(), torch.ones(())]
    lists = [[each] for each in state]
    torch._fused_adamw_(
        *lists[:4],
        [],
        lists[4],
        lr=0.1,
        beta1=0.9,
        beta2=0.99,
        weight_decay=0.1,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
    )
    return state


@pytest.mark.parametrize(
    "make",
    [
        lambda x: [*torch.max(x, 1), *torch.var_mean(x, 0)],
        lambda x: [torch.sort(x, 1)[1]],
        lambda x: [torch.cat([x, x.t(), x[:1]]), torch.stack([x, x])],
        lambda x: torch._foreach_mul([x, x.t()], [2.0, 3.0]),
        lambda x: list(torch.tensor_split(x.sin(), 3)),
        lambda x: [x[:, torch.tensor([0, 2])], x[torch.tensor([1]), :, None]],
        lambda x: [x.index_put((torch.tensor([0]), torch.tensor([1])), torch.tensor(5.0))],
        lambda x: [x * 2, 1 - x, x > 0, x + torch.tensor(2.0), x.pow(2)],
        lambda x: [x.double() + 1j, torch.view_as_real(x + 1j), (x + 1j).conj(), (x + 1j).conj().imag],
        lambda x: [x.sin().view(torch.int16), x.view(torch.uint8)[0]],
        lambda x: [x[:0].exp(), x.sum(), torch.zeros(0, 3)],
        lambda x: [torch.add(x, x, out=torch.empty(4, 4)), torch.add(x, 1, out=torch.empty(0))],
        lambda x: [torch.mm(x, x, out=torch.empty(4, 4).t()), torch.sin(x, out=x.clone())],
        lambda x: list(torch.native_layer_norm(x, [4], None, torch.ones(4), 1e-5)),
        lambda x: [
            each
            for each in torch.ops.aten.convolution_backward(
                x[None, None],
                x[None, None],
                x[None, None, :1, :1],
                None,
                [1, 1],
                [0, 0],
                [1, 1],
                False,
                [0, 0],
                1,
                [False, True, False],
            )
            if each is not None
        ],
        lambda x: [F.embedding(torch.tensor([1, 3]), x), F.one_hot(torch.arange(3), 5)],
        lambda x: [torch.arange(5), torch.full((2,), 3.0), torch.eye(3), torch.linspace(0, 1, 4)],
        lambda x: [F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None], is_causal=True)],
        lambda x: [x.to(torch.bfloat16).softmax(-1, dtype=torch.float32)],
        lambda x: [x.expand(3, 4, 4).cumsum(0), x.unfold(0, 2, 1).mul(2)],
        lambda x: [x.new_empty(6).copy_(x.view(-1)[:6]), torch.empty(3).fill_(2), torch.empty_like(x).normal_()],
        lambda x: [torch.empty(2, 4).copy_(x[:2]).add_(1), torch.empty(8)[:8].zero_()],
        lambda x: (pair := [x.sin(), x.t().exp()], torch._foreach_mul_(pair, 2.0), torch._foreach_sin_(pair))[0],
        fused_adamw,
    ],
)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_operator_of_any_kind_is_run_again(taped: Taped, make: Callable[[Tensor], list[Tensor]]) -> None:
    targets = make(torch.randn(4, 4))
    assert targets
    taped.made_again(*(each if is_whole(each) else each.clone() for each in targets))


def test_bits_of_what_is_no_number_are_kept(taped: Taped) -> None:
    x = torch.tensor([0x7F800001, 0x7FC00123, 1], dtype=torch.int32)
    y = x.clone().view(torch.float32)
    z = y.clone()
    assert z.isnan().any()
    taped.made_again(y, z)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda x: torch.empty(3), id="some of it was never written"),
        pytest.param(lambda x: torch.empty(4).add_(1), id="it updates what nobody wrote"),
        pytest.param(lambda x: torch.empty(4, 4).sin(), id="it reads what nobody wrote"),
        pytest.param(lambda x: torch.nonzero(x), id="the host waits"),
        pytest.param(lambda x: torch._unique2(x)[0], id="the host waits for another"),
        pytest.param(lambda x: x[x > 0], id="the host waits for a mask"),
        pytest.param(lambda x: x.masked_select(x > 0), id="the host waits for another mask"),
        pytest.param(lambda x: torch.sin(x.resize_(2).resize_(64)), id="a tensor was made smaller and larger"),
        pytest.param(lambda x: torch.sin(x.resize_(64)), id="a tensor was made larger"),
        pytest.param(lambda x: x.to_sparse(), id="it has no strides"),
        pytest.param(lambda x: x.to_sparse().to_dense(), id="it was made of what has no strides"),
        pytest.param(lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), id="it is quantized"),
        pytest.param(
            lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize(), id="it was made of that"
        ),
        pytest.param(lambda x: torch.empty(3, device="meta"), id="it has no bytes"),
    ],
)
def test_there_is_no_closure_where(taped: Taped, make: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(4, 4)
    assert taped.find(x.sin()) is not None
    assert taped.find(make(x)) is None


def test_rows_and_columns_that_were_filled_one_by_one_are_filled_again(taped: Taped) -> None:
    rows, x, y = torch.empty(3, 4), torch.empty(3, 4), torch.empty(2, 3, 8)
    for row in range(3):
        rows[row] = torch.full((4,), row)
    assert short(taped.find(rows)).count("empty") == 1
    for column in range(4):
        if column == 3:
            assert taped.find(x) is None
        x[:, column] = column
    y[..., ::2] = x[0, 0]
    y[..., 1::2] = 2
    y = y.sin()
    z = torch.empty_like(y)
    z[..., :4], z[..., 4:] = y[..., 4:], y[..., :4]
    taped.made_again(rows, x, y, z.exp())


def test_part_that_was_written_is_made_again_and_the_rest_is_not(taped: Taped) -> None:
    x = torch.empty(4, 4)
    x[:2].fill_(1)
    x[:2].mul_(2)
    assert taped.find(x) is None
    taped.made_again(x[:2].clone())
    assert taped.find(x[1:3].sin()) is None
    x[2:].zero_()
    taped.made_again(x, x[1:3].sin())


def test_operator_of_others_is_not_run_again(taped: Taped) -> None:
    with torch.library._scoped_library("tiers_closure", "FRAGMENT") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x * 2, "CPU")
        assert taped.find(torch.ops.tiers_closure.double(torch.ones(3)).sin()) is None


def test_what_an_operator_left_that_raised_is_a_leaf(taped: Taped) -> None:
    x, y = torch.ones(3), torch.ones(3)
    with pytest.raises(RuntimeError):
        x.add_(torch.ones(2))
    with pytest.raises(RuntimeError):
        y.index_add_(0, torch.tensor([7]), y)  # it may have written half of it
    z, w = x.sin(), y.sin()
    with pytest.raises(RuntimeError):
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert short(taped.find(z)) == short(taped.find(w)) == ["sin"]
    assert taped.find(x) is None and taped.find(y) is None
    taped.made_again(z, w, x.cos())


def test_input_is_no_target(taped: Taped, x: Tensor) -> None:
    assert taped.find(x) is None


def test_what_was_packed_is_no_target(taped: Taped) -> None:
    x = torch.ones(3)
    taped.note(x)
    assert taped.find(x) is None


def test_there_is_none_where_nothing_is_recorded(taped: Taped) -> None:
    others: list[object] = []
    x = torch.ones(2)
    in_another_thread(lambda: others.append(taped.find(x)))
    assert others == [None] and taped.find(x) is not None
    taped.recorder.stop()
    assert taped.find(x) is None


# ------------------------------------------------------------------------------------- random numbers


def test_random_numbers_are_drawn_again_and_none_of_the_program_s(taped: Taped) -> None:
    x = torch.rand(5)
    y = F.dropout(x, 0.5)
    given = torch.Generator().manual_seed(3)
    z = torch.randn(4, generator=given)
    w = torch.empty(3).uniform_(generator=given)
    noise, permuted = F.rrelu(torch.randn(6), training=True), torch.randperm(7)
    before, given_before = torch.get_rng_state(), given.get_state()
    taped.made_again(x, y, z, w, noise, permuted)
    taped.made_again(w)
    assert torch.equal(given.get_state(), given_before) and torch.equal(torch.get_rng_state(), before)


# ------------------------------------------------------------------------------------- when it runs


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_differs_names_the_operator(taped: Taped) -> None:
    x = torch.ones(3)
    closure = found(taped.find(x.sin()))
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("sin", lambda x: torch.zeros(4), "CPU", allow_override=True)
        with pytest.raises(Differs, match=r"^aten::sin: its result has another shape$"):
            closure.make([])


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.parametrize(
    "other",
    [lambda: torch.zeros(2, 2).t(), lambda: torch.zeros(2, 2).double(), lambda: torch.zeros(6)[:4].view(2, 2)],
    ids=["other strides", "another type", "a larger storage"],
)
def test_operator_that_returns_what_is_of_another_form_differs(taped: Taped, other: Callable[[], Tensor]) -> None:
    closure = found(taped.find(torch.ones(2, 2).sin()))
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("sin", lambda x: other(), "CPU", allow_override=True)
        with pytest.raises(Differs, match=r"^aten::sin: its result"):
            closure.make([])


def test_what_was_packed_may_lie_anywhere_with_what_lay_before_it(recorder: Recorder) -> None:
    x = torch.randn(4, 3)
    taped = Taped(recorder)
    taped.note(x[1:])  # from its fourth number on
    y = x[2:].t().mul(2)
    closure = found(taped.find(y))
    recorder.stop()
    room = torch.zeros(1000, dtype=torch.uint8)
    room = room[-room.data_ptr() % 64 :]
    room[256:304] = bytes_of(x)
    x.zero_()
    as_floats = room.view(torch.float32)
    assert torch.equal(*closure.make([as_floats[67:70].view(3, 1)]), y)
    for first in (0, 2, len(as_floats) - 8):
        with pytest.raises(Differs, match="another size"):
            closure.make([as_floats[first : first + 3]])
    with pytest.raises(Differs, match="odd address"):
        closure.make([as_floats[68:71]])
    with pytest.raises(Differs, match="another device"):
        closure.make([room.to("meta")])
    with pytest.raises(RuntimeError, match="fewer values"):
        closure.make([])


def test_leaf_that_is_written_unseen_makes_it_stale(x: Tensor, sine: Bound) -> None:
    assert not sine.is_stale
    in_another_thread(lambda: x.add_(1))
    assert sine.is_stale
    with pytest.raises(Differs, match="written since"):
        sine.make([])


def test_leaf_that_is_resized_makes_it_differ(taped: Taped, x: Tensor, sine: Bound) -> None:
    taped.recorder.stop()
    x.untyped_storage().resize_(0)
    with pytest.raises(Differs, match="another size"):
        sine.make([])


def test_settings_have_to_be_the_same(taped: Taped) -> None:
    x = torch.ones(3)
    closure = found(taped.find(x.softmax(0)))
    before = torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()
    try:
        torch._C._set_mkldnn_enabled(not before)
        with pytest.raises(Differs, match="settings"):
            closure.make([])
        y = x.softmax(0)
        assert taped.find(y) is None, "what it was made of was made under others"
    finally:
        torch._C._set_mkldnn_enabled(before)
    z = y.softmax(0)
    assert taped.find(z) is None
    packed = taped.note(y)
    w = y.softmax(0)
    assert found(taped.find(w)).inputs == (packed,)
    taped.made_again(w)


def test_operators_have_to_have_run_in_the_same_number_of_threads(taped: Taped) -> None:
    x, threads = torch.ones(3).sin(), torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert taped.find(x.cos()) is None
    finally:
        torch.set_num_threads(threads)
    assert taped.find(x.cos()) is not None


def test_the_host_computes_as_it_did_and_is_left_as_it_is(taped: Taped) -> None:
    """In so many threads, and with numbers near zero as they are or as zero."""
    y = torch.full((3,), 1e-39).mul(0.5)
    closure, threads = found(taped.find(y)), torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        torch.set_flush_denormal(True)
        (made,) = closure.make([])
        assert torch.get_num_threads() == threads + 1
        assert not torch.full((1,), 1e-39).mul(0.5).any()
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)
    assert torch.equal(made, y) and made.all()


def test_it_runs_below_whatever_the_program_has_set(taped: Taped) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Forbidding(TorchDispatchMode):
        def __torch_dispatch__(self, func: object, types: object, args: object = (), kwargs: object = None) -> object:
            raise AssertionError

    x = torch.randn(3, 3, requires_grad=True)
    y = (x @ x).relu()
    closure = found(taped.find(y))
    for mode in (torch.autocast("cpu", dtype=torch.bfloat16), Forbidding(), torch.no_grad(), torch.device("meta")):  # type: ignore[no-untyped-call]
        with mode:
            (made,) = closure.make([])
        assert torch.equal(made, y) and not made.requires_grad and made.grad_fn is None
    with torch.inference_mode():
        (made,) = closure.make([])
    assert not made.is_inference() and torch.equal(made, y)
    in_another_thread(lambda: closure.make([]))
    torch.func.grad(lambda z: z * closure.make([])[0].sum())(torch.tensor(1.0))
    listed = taped.recorder.listed()
    closure.make([])
    assert taped.recorder.listed() == listed, "what runs again is not recorded"
    assert short(taped.find(y)) == short(closure)


def test_what_is_made_may_be_changed(taped: Taped) -> None:
    x = torch.randn(3)
    y = x.sin()
    closure = found(taped.find(y))
    closure.make([])[0].zero_()
    assert torch.equal(*closure.make([]), y)


# ------------------------------------------------------------------------------------- who writes a leaf


def backward_that_writes(x: Tensor) -> None:
    y = torch.ones(4, requires_grad=True) * 2
    y.register_hook(lambda _: x.add_(1))
    y.sum().backward()


WRITES: list[Callable[[Tensor], object]] = [
    lambda x: (x.add_(1), x.mul_(2)),
    lambda x: x[1:].view(-1).fill_(0),
    lambda x: torch._foreach_add_([torch.ones(2), x], 1.0),
    lambda x: torch.sin(torch.ones(2), out=x[:2]),
    backward_that_writes,
]


@pytest.mark.parametrize("write", [*WRITES, lambda x: x.data.zero_(), lambda x: x.resize_(64).zero_()])
def test_leaf_that_it_has_itself_is_copied_before_a_write_of_any_kind(
    taped: Taped, x: Tensor, sine: Bound, write: Callable[[Tensor], object]
) -> None:
    y = x.sin()
    other = found(taped.find(y))
    write(x)
    for each in (sine, other):
        assert has_the_bits_of(*each.make([]), y)


@pytest.mark.parametrize("write", WRITES)
def test_leaf_that_is_written_after_the_record_makes_it_differ(
    taped: Taped, x: Tensor, sine: Bound, write: Callable[[Tensor], object]
) -> None:
    taped.recorder.stop()
    write(x)
    with pytest.raises(Differs, match="written since"):
        sine.make([])


def test_closure_that_is_gone_copies_nothing(taped: Taped, x: Tensor) -> None:
    one, other = found(taped.find(x.sin())), found(taped.find(y := x.cos()))
    del one
    x.add_(1)
    assert torch.equal(*other.make([]), y)
