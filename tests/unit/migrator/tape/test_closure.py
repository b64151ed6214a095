"""Which operators make a tensor again, from what, and when there is no telling."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.unit.migrator.tape.records import in_another_thread
from torch_tiers.migrator.tape.closure import Closure, Differs, Refused, Stops
from torch_tiers.migrator.tape.recorder import Recorder


@pytest.fixture
def taped(recorder: Recorder) -> Recorder:
    recorder.begin(states=True)
    return recorder


@pytest.fixture
def x() -> Tensor:
    """What was there before anything was recorded."""
    return torch.randn(4)


@pytest.fixture
def sine(recorder: Recorder, x: Tensor) -> Closure:
    """The closure of its sine, in a record that goes on."""
    recorder.begin()
    return closure_of(recorder, x.sin())


def closure_of(recorder: Recorder, *targets: Tensor, stops: Stops | None = None) -> Closure:
    found = recorder.closure(targets, stops)
    assert isinstance(found, Closure), found
    return found


def refusal_of(recorder: Recorder, *targets: Tensor, stops: Stops | None = None) -> str:
    found = recorder.closure(targets, stops)
    assert isinstance(found, Refused)
    return found.reason


def short(closure: Closure) -> list[str]:
    return [each.removeprefix("aten::").partition(".")[0] for each in closure.names]


def made_again(recorder: Recorder, *targets: Tensor) -> list[Tensor]:
    """The bits of the targets, on storages of their own."""
    closure = closure_of(recorder, *targets)
    assert recorder.verify(closure, targets)
    made = closure.run()
    for one, other in zip(made, targets, strict=True):
        assert other.numel() == 0 or one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
    return made


# ------------------------------------------------------------------------------------- what is in it


def test_it_has_what_made_the_target_and_nothing_else(taped: Recorder) -> None:
    x = torch.randn(3)
    y = x.sin()
    x.cos()
    y.exp()
    z = y.tan()
    closure = closure_of(taped, z)
    assert short(closure) == ["randn", "sin", "tan"] and closure.numbers == (0, 1, 4) and closure.operators == 3
    made_again(taped, z)


def test_view_is_a_part_of_what_its_base_is(taped: Recorder) -> None:
    x = torch.randn(4, 3).t()[1:].contiguous()
    view = x.view(2, 2, 2).transpose(0, 2)[1].unsqueeze(0)
    assert short(closure_of(taped, view)) == ["randn", "clone"]
    assert made_again(taped, view)[0].stride() == view.stride()


def test_begins_with_what_was_there_before(recorder: Recorder) -> None:
    x, weight = torch.randn(3, 4), torch.randn(5, 4, requires_grad=True)
    recorder.begin()
    y = F.linear(x[1:], weight).relu()
    closure = closure_of(recorder, y)
    recorder.end()
    assert sorted(each.nbytes for each in closure.leaves) == [48, 80]
    assert all(each.state < 0 and each.relative is None for each in closure.leaves)
    assert all(each is not None and each.dtype == torch.uint8 for each in closure.leaf_tensors())
    assert torch.equal(closure.run()[0], y)


def test_goes_no_further_than_what_is_promised(taped: Recorder) -> None:
    x = torch.randn(3)
    y = x.sin()
    stops = taped.stops()
    key = stops.add(y[1:])
    z = y.exp().mul(2)
    closure = closure_of(taped, z, stops=stops)
    assert short(closure) == ["exp", "mul"]
    (leaf,) = closure.leaves
    assert (leaf.storage, leaf.state) == key
    assert leaf.relative == (3, 0)  # a view is an operator, too
    assert torch.equal(closure.run()[0], z)


def test_promise_of_one_record_holds_in_the_next_as_a_distance(recorder: Recorder) -> None:
    x = torch.randn(3, 4)

    def program() -> list[Tensor]:
        y = x.sin()
        values, _ = torch.max(y, 1)
        return [y, values, values.exp().mul(2)]

    recorder.begin()
    _, values, z = program()
    stops = recorder.stops()
    stops.add(values)
    before = closure_of(recorder, z)
    recorder.end()
    recorder.begin()
    torch.zeros(2)
    _, values, z = program()
    found = recorder.closure([z], relative=[(2, 0)])
    recorder.end()
    assert short(before) == ["sin", "max", "exp", "mul"]
    assert isinstance(found, Closure) and short(found) == ["exp", "mul"]
    assert found.leaves[0].relative == (2, 0)
    assert torch.equal(found.run()[0], z)


def test_distance_that_leads_nowhere_promises_nothing(taped: Recorder) -> None:
    x = torch.randn(3).sin()
    found = taped.closure([x], relative=[(99, 0), (1, 7)])
    assert isinstance(found, Closure) and short(found) == ["randn", "sin"]


def test_promises_of_another_record_are_refused(recorder: Recorder) -> None:
    recorder.begin()
    stops = recorder.stops()
    recorder.end()
    recorder.begin()
    x = torch.ones(2)
    assert "another record" in refusal_of(recorder, x, stops=stops)
    assert stops.add(x) is None


def test_tape_that_is_over_has_the_same_closures(recorder: Recorder) -> None:
    x = torch.randn(3)
    recorder.begin()
    y = x.sin().add_(1)
    live = closure_of(recorder, y)
    tape = recorder.end()
    assert tape is not None
    after = tape.closure([y])
    assert isinstance(after, Closure) and after.signature == live.signature and after.names == live.names
    assert torch.equal(after.run()[0], y)
    y.mul_(2)
    assert isinstance(tape.closure([y]), Refused)


def test_signature_tells_what_is_computed(taped: Recorder) -> None:
    def signature(target: Tensor) -> int:
        return closure_of(taped, target).signature

    x, y = torch.ones(3), torch.ones(3)
    first = signature(x.mul(2).add(1))
    assert signature(y.mul(2).add(1)) == first
    assert signature(x.mul(3).add(1)) != first
    assert signature(x.mul(2).add(2)) != first
    assert signature(x.mul(2).add(1)[1:]) != first
    assert signature(torch.ones(4).mul(2).add(1)) != first
    assert signature(x + y) != signature(x + x)
    assert signature((z := x.sin()) * z) != signature(x.sin() * x.sin())


# ------------------------------------------------------------------------------------- writes


def test_what_was_written_in_place_is_written_again(taped: Recorder) -> None:
    x = torch.randn(4, 4)
    x[1].mul_(2)
    x.t()[0] = 3
    x.data.add_(1)
    y = x.relu_()
    x.masked_fill_(x > 2, 0.5)
    made_again(taped, y)
    assert "relu_" in short(closure_of(taped, y[1:]))


def test_leaf_is_not_written(recorder: Recorder) -> None:
    x = torch.randn(4)
    recorder.begin()
    kept = x.clone()
    stops = recorder.stops()
    stops.add(kept)
    held = kept.clone()
    kept.add_(1)
    y = kept.sin()
    closure = closure_of(recorder, y, stops=stops)
    recorder.end()
    assert closure.leaf_tensors() == (None,)
    before = held.clone()
    for _ in range(2):
        assert torch.equal(closure.run([held])[0], y)
        assert torch.equal(held, before)


def test_promise_that_was_written_since_is_not_taken_for_kept(taped: Recorder) -> None:
    x = torch.randn(4)
    stops = taped.stops()
    stops.add(x)
    held, y = x.clone(), x.sin()
    x.add_(1)
    closure = closure_of(taped, y, stops=stops)
    with pytest.raises(Differs, match="written since"):
        closure.run([x])
    assert torch.equal(closure.run([held])[0], y)


def test_targets_of_one_storage_in_two_states_are_both_made(taped: Recorder) -> None:
    x = torch.randn(4)
    y = x.sin()
    closures = [taped.closure([y])]
    stops = taped.stops()
    y.add_(1)
    first = y.clone()
    y.mul_(3)
    second, half = y.clone(), y[2:]
    closures.append(taped.closure([y, half, first, second]))
    assert all(isinstance(each, Closure) for each in closures)
    made_again(taped, y, half, first, second)
    del stops


def test_targets_that_share_memory_share_it_again(taped: Recorder) -> None:
    x = torch.randn(4, 4).exp()
    one, other = made_again(taped, x[1:], x.t())
    assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def test_running_statistics_are_left_alone(recorder: Recorder) -> None:
    x, mean, variance = torch.randn(5, 3), torch.zeros(3), torch.ones(3)
    recorder.begin()
    y = F.batch_norm(x, mean, variance, training=True)
    after = mean.clone()
    closure = closure_of(recorder, y)
    assert "written since" in refusal_of(recorder, after) or "nobody wrote" in refusal_of(recorder, after)
    recorder.end()
    assert len(closure.leaves) == 1
    expected = mean.clone()
    assert torch.equal(closure.run(poison=0xFF)[0], y) and torch.equal(mean, expected)


def test_running_statistics_that_are_read_are_leaves(recorder: Recorder) -> None:
    x, mean, variance = torch.randn(5, 3), torch.zeros(3), torch.ones(3)
    recorder.begin()
    y = F.batch_norm(x, mean, variance, training=False)
    closure = closure_of(recorder, y)
    recorder.end()
    assert len(closure.leaves) == 3 and torch.equal(closure.run()[0], y)


@pytest.mark.parametrize("who", [lambda write: write(), in_another_thread], ids=["this thread", "another"])
def test_leaf_that_is_written_later_is_none(recorder: Recorder, x: Tensor, who: Callable[..., None]) -> None:
    recorder.begin()
    y = x.sin()
    who(lambda: x.add_(1))
    assert "written since" in refusal_of(recorder, y)


def test_what_a_storage_has_now_will_do_where_what_it_had_is_lost(recorder: Recorder) -> None:
    x = torch.randn(4)
    recorder.begin()
    x.add_(1)
    x.mul_(2)
    y = x.sin().exp()
    closure = closure_of(recorder, y)
    assert short(closure) == ["sin", "exp"] and torch.equal(closure.run()[0], y)
    assert "written since" in refusal_of(recorder, x)
    del x, closure
    assert "is gone" in refusal_of(recorder, y.add_(1))


def test_vectors_that_an_iteration_refined_are_leaves(recorder: Recorder) -> None:
    weight, u, v, x = torch.randn(4, 3), torch.randn(4), torch.randn(3), torch.randn(2, 4)
    recorder.begin()
    F.normalize(weight.t() @ u, dim=0, out=v)
    F.normalize(weight @ v, dim=0, out=u)
    y = x @ (weight / (u.clone() @ (weight @ v.clone())))
    closure = closure_of(recorder, y)
    recorder.end()
    assert sorted(each.nbytes for each in closure.leaves) == [12, 16, 32, 48]
    assert torch.equal(closure.run()[0], y)


def test_numbers_of_python_s_are_kept(taped: Recorder) -> None:
    x = torch.zeros(4, 4)
    x[1] = 3
    y = x[torch.tensor([1, 0])] * torch.tensor(0.5)
    closure = closure_of(taped, y)
    assert [each.is_constant for each in closure.leaves] == [True] * 3
    assert closure.leaf_tensors() == (None,) * 3
    made_again(taped, y)
    z = x[torch.tensor([1, 2])] * torch.tensor(0.5)
    assert closure_of(taped, z).signature != closure.signature


def test_leaf_that_is_gone_is_none(recorder: Recorder) -> None:
    x = torch.randn(4)
    recorder.begin()
    y = x.sin()
    del x
    assert "is gone" in refusal_of(recorder, y)


# ------------------------------------------------------------------------------------- operators of all kinds


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
        lambda x: [torch.mm(x, x, out=torch.empty(4, 4).t())],
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
    ],
)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_operator_of_any_kind_is_run_again(taped: Recorder, make: Callable[[Tensor], list[Tensor]]) -> None:
    x = torch.randn(4, 4)
    targets = [each for each in make(x) if taped.closure([each]) != Refused("it is not as this tape left it")]
    assert targets
    for each in targets:
        made_again(taped, each)
    made_again(taped, *targets)


def test_bits_of_what_is_no_number_are_kept(taped: Recorder) -> None:
    x = torch.tensor([0x7F800001, 0x7FC00123, 1], dtype=torch.int32)
    y = x.clone().view(torch.float32)
    z = y.clone()
    assert z.isnan().any()
    made_again(taped, y, z)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda x: torch.empty(3), "never written"),
        (lambda x: torch.empty(4).add_(1), "nobody wrote"),
        (lambda x: torch.empty(4, 4).sin(), "nobody wrote"),
        (lambda x: torch.nonzero(x), "the host waits"),
        (lambda x: x[x > 0], "the host waits"),
        (lambda x: torch.sin(x.resize_(2).resize_(64)), "changed where a tensor lies"),
        (lambda x: torch.sin(x.resize_(64)), "changed where a tensor lies"),
        (lambda x: x.to_sparse(), "no strides"),
        (lambda x: x.to_sparse().to_dense(), "no strides"),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "no strides"),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize(), "quantized"),
        (lambda x: torch.empty(3, device="meta"), "no strides"),
    ],
)
def test_what_cannot_be_made_again_is_refused(taped: Recorder, make: Callable[[Tensor], Tensor], reason: str) -> None:
    target = make(torch.randn(4, 4))
    assert reason in refusal_of(taped, target)


def test_rows_and_columns_that_were_filled_one_by_one_are_filled_again(taped: Recorder) -> None:
    rows, x, y = torch.empty(3, 4), torch.empty(3, 4), torch.empty(2, 3, 8)
    for row in range(3):
        rows[row] = torch.full((4,), row)
    assert short(closure_of(taped, rows)).count("empty") == 1
    for column in range(4):
        if column == 3:
            assert "never written" in refusal_of(taped, x)
        x[:, column] = column
    y[..., ::2] = x[0, 0]
    y[..., 1::2] = 2
    y = y.sin()
    z = torch.empty_like(y)
    z[..., :4], z[..., 4:] = y[..., 4:], y[..., :4]
    made_again(taped, rows, x, y, z.exp())


def test_part_that_was_written_is_made_again_and_the_rest_refused(taped: Recorder) -> None:
    x = torch.empty(4, 4)
    x[:2].fill_(1)
    assert "never written" in refusal_of(taped, x)
    made_again(taped, x[:2])
    assert "nobody wrote" in refusal_of(taped, x[1:3].sin())


def test_operator_of_others_is_refused(taped: Recorder) -> None:
    with torch.library._scoped_library("tiers_closure", "FRAGMENT") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x * 2, "CPU")
        y = torch.ops.tiers_closure.double(torch.ones(3)).sin()
        assert refusal_of(taped, y) == "tiers_closure::double: it is none of PyTorch's own operators"


def test_what_an_operator_left_that_raised_is_a_leaf(taped: Recorder) -> None:
    x = torch.ones(3)
    with pytest.raises(RuntimeError):
        x.add_(torch.ones(2))
    y = x.sin()
    assert short(closure_of(taped, y)) == ["sin"]
    assert "no operator" in refusal_of(taped, x)


def test_input_is_no_target(recorder: Recorder) -> None:
    x = torch.ones(3)
    recorder.begin()
    assert "no operator of this tape" in refusal_of(recorder, x.t())


def test_target_that_is_promised_is_refused(taped: Recorder) -> None:
    x = torch.ones(3)
    stops = taped.stops()
    stops.add(x)
    assert refusal_of(taped, x[1:], stops=stops) == "it is among what is there"


def test_nothing_is_closed_where_nothing_is_recorded(recorder: Recorder) -> None:
    assert isinstance(recorder.closure([torch.ones(2)]), Refused)
    found: list[object] = []
    recorder.begin()
    x = torch.ones(2)
    in_another_thread(lambda: found.append(recorder.closure([x])))
    recorder.end()
    assert isinstance(found[0], Refused)
    assert isinstance(recorder.closure([]), Refused)


# ------------------------------------------------------------------------------------- random numbers


def test_random_numbers_are_drawn_again_and_none_of_the_program_s(taped: Recorder) -> None:
    x = torch.rand(5)
    y = F.dropout(x, 0.5)
    given = torch.Generator().manual_seed(3)
    z = torch.randn(4, generator=given)
    w = torch.empty(3).uniform_(generator=given)
    noise, permuted = F.rrelu(torch.randn(6), training=True), torch.randperm(7)
    before, given_before = torch.get_rng_state(), given.get_state()
    closure = closure_of(taped, y)
    assert closure.random
    made_again(taped, x, y, z, w, noise, permuted)
    made_again(taped, w)
    assert torch.equal(given.get_state(), given_before) and torch.equal(torch.get_rng_state(), before)


def test_random_numbers_whose_state_is_not_noted_are_refused(recorder: Recorder) -> None:
    recorder.begin()
    x = torch.rand(3)
    assert "state" in refusal_of(recorder, x)
    y = torch.ones(1, 1, 4, 4)
    assert short(closure_of(recorder, F.scaled_dot_product_attention(y, y, y)))[-1].startswith("_scaled")


# ------------------------------------------------------------------------------------- when it runs


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_differs_names_the_operator(taped: Recorder) -> None:
    x = torch.ones(3)
    closure = closure_of(taped, x.sin())
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("sin", lambda x: torch.zeros(4), "CPU", allow_override=True)
        with pytest.raises(Differs, match=r"^aten::sin: its result has another shape$"):
            closure.run()


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_other_bits_are_not_verified(taped: Recorder) -> None:
    x = torch.ones(3)
    y = x.sin()
    closure = closure_of(taped, y)
    assert taped.verify(closure, [y])
    assert not taped.verify(closure, [y.clone().add_(1)]) and not taped.verify(closure, [y[:2]])
    assert not taped.verify(closure, [])
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("sin", lambda x: torch.zeros(3), "CPU", allow_override=True)
        assert not taped.verify(closure, [y])


def test_leaf_may_lie_elsewhere(recorder: Recorder) -> None:
    x = torch.randn(4, 3)
    recorder.begin()
    y = x[1:].t().mul(2)
    closure = closure_of(recorder, y)
    recorder.end()
    (whole,) = closure.leaf_tensors()
    assert whole is not None
    room = torch.zeros(1000, dtype=torch.uint8)
    room = room[-room.data_ptr() % 64 :]
    room[256:304] = whole
    x.zero_()
    assert torch.equal(closure.run([room[256:304]])[0], y)
    assert torch.equal(closure.run([room[256:304].clone()])[0], y)
    part = room.view(torch.float32)[67:70].view(3, 1)  # from its fourth number on
    assert torch.equal(closure.run([(part, 12)])[0], y)
    for first in (0, 8, 280, 10_000):
        with pytest.raises(Differs):
            closure.run([(part, first)])
    for wrong in (room, room[256:303], room.to("meta")):
        with pytest.raises(Differs):
            closure.run([wrong])
    with pytest.raises(Differs):
        closure.run([])
    for odd in (33, 288):
        with pytest.raises(Differs, match="odd address"):
            closure.run([room[odd : odd + 48]])


def test_leaf_that_is_written_makes_it_stale(recorder: Recorder, x: Tensor, sine: Closure) -> None:
    assert not sine.is_stale
    recorder.end()
    x.add_(1)
    assert sine.is_stale
    with pytest.raises(Differs, match="written since"):
        sine.run()


def test_leaf_that_is_resized_makes_it_differ(recorder: Recorder, x: Tensor, sine: Closure) -> None:
    recorder.end()
    x.untyped_storage().resize_(0)
    with pytest.raises(Differs, match="another size"):
        sine.run()


def test_leaf_whose_write_is_told_of_makes_it_stale(recorder: Recorder, x: Tensor, sine: Closure) -> None:
    x.numpy().fill(1)
    recorder.unseen(x)
    recorder.end()
    assert sine.is_stale


def test_settings_have_to_be_the_same(taped: Recorder) -> None:
    closure = closure_of(taped, torch.ones(3).sin())
    before = torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()
    try:
        torch._C._set_mkldnn_enabled(not before)
        with pytest.raises(Differs, match="settings"):
            closure.run()
        y = torch.ones(3).sin()
    finally:
        torch._C._set_mkldnn_enabled(before)
    assert "settings" in refusal_of(taped, y + torch.ones(3))


def test_the_host_computes_as_it_did_and_is_left_as_it_is(taped: Recorder) -> None:
    """In so many threads, and with numbers near zero as they are or as zero."""
    y = torch.full((3,), 1e-39).mul(0.5)
    closure, threads = closure_of(taped, y), torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        torch.set_flush_denormal(True)
        (made,) = closure.run()
        assert torch.get_num_threads() == threads + 1
        assert not torch.full((1,), 1e-39).mul(0.5).any()
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)
    assert torch.equal(made, y) and made.all()


def test_it_runs_below_whatever_the_program_has_set(taped: Recorder) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Forbidding(TorchDispatchMode):
        def __torch_dispatch__(self, func: object, types: object, args: object = (), kwargs: object = None) -> object:
            raise AssertionError

    x = torch.randn(3, 3, requires_grad=True)
    y = (x @ x).relu()
    closure = closure_of(taped, y)
    for mode in (torch.autocast("cpu", dtype=torch.bfloat16), Forbidding(), torch.no_grad(), torch.device("meta")):  # type: ignore[no-untyped-call]
        with mode:
            (made,) = closure.run()
        assert torch.equal(made, y) and not made.requires_grad and made.grad_fn is None
    with torch.inference_mode():
        (made,) = closure.run()
    assert not made.is_inference() and torch.equal(made, y)
    in_another_thread(lambda: closure.run())
    torch.func.grad(lambda z: z * closure.run()[0].sum())(torch.tensor(1.0))
    before = closure.operators
    assert closure_of(taped, y).operators == before, "what runs again is not recorded"


def test_what_is_made_may_be_changed(taped: Recorder) -> None:
    x = torch.randn(3)
    y = x.sin()
    closure = closure_of(taped, y)
    closure.run()[0].zero_()
    assert torch.equal(closure.run()[0], y)


# ------------------------------------------------------------------------------------- watching


def test_holder_is_told_before_a_leaf_is_written(x: Tensor, sine: Closure) -> None:
    y, made = x.sin(), list[Tensor]()
    sine.watch(lambda leaf: made.extend(sine.run()))
    x.add_(1)
    x.mul_(2)
    assert len(made) == 1 and torch.equal(made[0], y) and sine.is_stale


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x[1:].view(-1).fill_(0),
        lambda x: torch._foreach_add_([torch.ones(2), x], 1.0),
        lambda x: torch.sin(torch.ones(2), out=x[:2]),
        lambda x: x.data.zero_(),
        lambda x: (torch.ones(4, requires_grad=True) * 2).sum().register_hook(lambda _: x.add_(1)),
    ],
)
def test_write_of_any_kind_is_told_of(recorder: Recorder, x: Tensor, write: Callable[[Tensor], object]) -> None:
    recorder.begin()
    closure = closure_of(recorder, x.sin(), x.cos())
    told: list[tuple[int, Tensor]] = []
    before = x.clone()
    closure.watch(lambda leaf: told.append((leaf, x.clone())))
    write(x)
    if not told:
        y = torch.ones(4, requires_grad=True)
        z = y * 2
        z.register_hook(lambda _: x.add_(1))
        z.sum().backward()
    assert [leaf for leaf, _ in told] == [0] and torch.equal(told[0][1], before)


def test_holder_that_is_gone_is_not_told(recorder: Recorder, x: Tensor, sine: Closure) -> None:
    told: list[int] = []
    sine.watch(told.append)
    sine.watch(None)
    x.add_(1)
    other = closure_of(recorder, x.sin())
    other.watch(told.append)
    del other
    x.add_(1)
    assert told == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_holder_that_raises_does_not_keep_the_program_from_writing(x: Tensor, sine: Closure) -> None:
    expected = x + 1
    sine.watch(lambda leaf: 1 / 0)
    x.add_(1)
    assert torch.equal(x, expected) and sine.is_stale
