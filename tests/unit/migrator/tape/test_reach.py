"""Where nothing runs nothing is recorded; and whatever else PyTorch can do stays right while it is."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from tests.unit.migrator.tape.modes import SEES_INTO_MODES
from tests.unit.migrator.tape.records import end, in_another_thread, names
from torch_tiers.migrator.tape.closure import Closure
from torch_tiers.migrator.tape.recorder import Recorder
from torch_tiers.migrator.tape.tape import Tape


class Wrapper(Tensor):
    """A tensor that has another, as DTensor and torchao's do."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad)
        made.inner = inner.detach()
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = torch.utils._pytree.tree_map_only(Wrapper, lambda each: each.inner, (args, kwargs or {}))
        result = func(*plain[0], **plain[1])
        return Wrapper(result) if isinstance(result, Tensor) else result


def test_meta_and_fake_tensors_are_not_recorded(recorder: Recorder) -> None:
    recorder.begin()
    torch.ones(3, device="meta").sin()
    with FakeTensorMode() as mode:
        fake = torch.ones(3) + mode.from_tensor(torch.zeros(3))
    assert fake.shape == (3,)
    tape = end(recorder)
    assert set(names(tape)) <= {"zeros"}


def test_export_is_the_same(recorder: Recorder) -> None:
    model = nn.Linear(3, 3)
    recorder.begin()
    exported = torch.export.export(model, (torch.ones(2, 3),))
    end(recorder)
    assert [str(node.target) for node in exported.graph.nodes if node.op == "call_function"] == ["aten.linear.default"]


def test_transforms_are_right_and_their_real_operators_are_recorded(recorder: Recorder) -> None:
    x = torch.arange(6.0).reshape(2, 3)

    def gradients() -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda row: row.sin().sum()))(x)

    expected = gradients()
    recorder.begin()
    found = gradients()
    tape = end(recorder)
    assert torch.equal(found, expected)
    (sin,) = (each for each in tape.operators if each.name == "aten::sin")
    assert sin.inputs[0].form is not None and sin.inputs[0].form.sizes == (2, 3)


def test_operators_on_what_a_wrapper_has_are_recorded(recorder: Recorder) -> None:
    x = Wrapper(torch.ones(3))
    recorder.begin()
    y = (x + 1).sin()
    tape = end(recorder)
    assert tape.find(y) is None
    if not SEES_INTO_MODES:
        assert names(tape) == []
        return
    assert [each for each in names(tape) if each != "detach"] == ["add.Tensor", "sin"]
    add, sin = (each for each in tape.operators if each.name != "aten::detach")
    assert sin.inputs[0].producer == add.number


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "make", [lambda: torch.eye(3).to_sparse(), lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])]
)
def test_sparse_and_nested_tensors_are_values_without_a_form(recorder: Recorder, make: Any) -> None:
    x = make()
    expected = x * 2
    recorder.begin()
    found = x * 2
    tape = end(recorder)
    assert torch.equal(
        found.to_dense() if found.is_sparse else found[1], expected.to_dense() if found.is_sparse else expected[1]
    )
    (times,) = (each for each in tape.operators if each.name.startswith("aten::mul"))
    form = times.inputs[0].form
    assert form is None or form.sizes is None


def test_inference_tensors_have_no_version(recorder: Recorder) -> None:
    recorder.begin()
    with torch.inference_mode():
        x = torch.ones(3)
        x.add_(1)
        x.sin()
    ones, add, sin = end(recorder).operators
    assert [each.inputs[0].version for each in (add, sin)] == [None, None]
    assert sin.inputs[0].producer == add.number != ones.number


def test_record_that_ends_within_a_mode_is_over(recorder: Recorder) -> None:
    with torch.inference_mode():
        recorder.begin()
        end(recorder)
    recorder.begin()
    with torch.inference_mode():
        end(recorder)
    torch.ones(3)
    assert not torch._C._dispatch_tls_is_dispatch_key_included("Fake")


def test_backward_is_recorded_again_where_it_is_run_again(recorder: Recorder) -> None:
    x = torch.ones(3, requires_grad=True)
    recorder.begin()
    loss = x.sin().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    tape = end(recorder)
    assert names(tape).count("cos") == 2


def test_second_derivative_is_right_and_recorded(recorder: Recorder) -> None:
    def penalty() -> tuple[Tensor, Tensor]:
        x = torch.arange(1.0, 4.0).requires_grad_()
        (gradient,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)
        gradient.pow(2).sum().backward()
        assert x.grad is not None
        return gradient.detach(), x.grad

    expected = penalty()
    recorder.begin()
    found = penalty()
    tape = end(recorder)
    assert all(map(torch.equal, found, expected))
    assert names(tape).count("pow.Tensor_Scalar") >= 4  # of the function, and of its derivatives


def test_what_a_checkpoint_computes_again_is_recorded(recorder: Recorder) -> None:
    x = torch.ones(3, requires_grad=True)
    recorder.begin()
    y = checkpoint(lambda: x.sin().cos(), use_reentrant=False)
    assert isinstance(y, Tensor)
    y.sum().backward()
    tape = end(recorder)
    assert names(tape).count("sin") == 3  # the derivative of cos is one, too


def test_a_record_is_broken_by_an_operator_that_runs_past_its_end_or_into_it(recorder: Recorder) -> None:
    """As the threads of a backward do that raised in one of them: nobody counts what it writes then."""
    ended: list[Tape | None] = []
    x = torch.zeros(3)

    def write(x: Tensor) -> None:
        in_another_thread(lambda: ended.append(recorder.end()))
        in_another_thread(recorder.begin)
        x.add_(1)

    with torch.library._scoped_library("tiers_reach", "FRAGMENT") as library:
        library.define("write(Tensor(a!) x) -> ()")
        library.impl("write", write, "CPU")
        recorder.begin()
        torch.ops.tiers_reach.write(x)
    ended.append(recorder.end())
    assert [tape and tape.broken for tape in ended] == [
        "an operator was still running when it ended",
        "an operator was running before it began",
    ]
    recorder.begin()
    x.sin()
    assert names(end(recorder)) == ["sin"], "the next one is sound"


def test_threads_at_work_do_not_disturb_each_other(recorder: Recorder) -> None:
    stop = threading.Event()

    def work() -> None:
        x = torch.ones(3, requires_grad=True)
        while not stop.is_set():
            (x * 2).sum().backward()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        x = torch.ones(4, requires_grad=True)
        for _ in range(20):
            recorder.begin()
            x.sin().sum().backward()
            tape = end(recorder)
            assert {each.thread for each in tape.operators} == {tape.thread}
            assert names(tape)[:3] == ["sin", "sum", "ones_like"]
    finally:
        stop.set()
        thread.join()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork_records_nothing(recorder: Recorder) -> None:
    recorder.begin()
    x = torch.ones(3)
    child = os.fork()
    if child == 0:
        os._exit(int(recorder.is_recording or float(x.add_(1).sum()) != 6 or recorder.end() is not None))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    x.sin()
    assert names(end(recorder)) == ["ones", "sin"]


def test_mode_of_the_program_s_sees_what_it_sees_without(recorder: Recorder) -> None:
    from torch_tiers.migrator.tape.check import Listing

    listings = []
    for recording in (False, True):
        x = torch.ones(2, 3, requires_grad=True)
        if recording:
            recorder.begin()
        with Listing() as listing:
            (x @ x.t()).relu().sum().backward()
        listings.append(listing.calls)
    tape = end(recorder)
    assert listings[0] == listings[1]
    assert [each for each in names(tape) if each == "mm"] == ["mm"] * (3 if SEES_INTO_MODES else 0)


def test_write_in_a_mode_of_the_program_s_is_known(recorder: Recorder) -> None:
    from torch_tiers.migrator.tape.check import Listing

    x = torch.ones(3)
    recorder.begin()
    closure = recorder.closure([x.sin()])
    assert isinstance(closure, Closure)
    told: list[int] = []
    closure.watch(told.append)
    with Listing():
        x.mul_(2)
    y = x.cos()
    found = recorder.closure([y])
    recorder.stop()
    assert told == [0] and closure.is_stale
    assert isinstance(found, Closure) and torch.equal(found.run()[0], y)


def test_operator_of_the_program_s_own_is_one_operator(recorder: Recorder) -> None:
    @torch.library.custom_op("tape_tests::double_", mutates_args=("x",))
    def double_(x: Tensor) -> None:
        x.mul_(2)
        x.add_(0)

    recorder.begin()
    x = torch.ones(3)
    double_(x)
    x.sin()
    tape = end(recorder)
    own = next(each for each in tape.operators if each.name == "tape_tests::double_")
    assert own.writes and own.inputs[0].producer == 0
    assert tape.operators[-1].inputs[0].producer == own.number
    assert "aten::mul_.Tensor" not in [each.name for each in tape.operators]


def test_compiled_code_is_not_recorded_and_not_compiled_again(recorder: Recorder) -> None:
    compilations = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal compilations
        compilations += 1
        return graph

    @torch.compile(backend=backend)
    def product(x: Tensor) -> Tensor:
        return (x @ x).relu()

    x = torch.ones(2, 2)
    expected = product(x)
    recorder.begin()
    found = product(x)
    found.sin()
    tape = end(recorder)
    assert torch.equal(found, expected) and compilations == 1
    assert names(tape) == ["sin"] and tape.operators[0].inputs[0].producer is None
    recorder.begin()
    torch.compile(lambda x: x.cos(), backend=backend)(x)
    assert names(end(recorder)) == [] and compilations == 2


def test_what_inductor_has_made_is_not_recorded(recorder: Recorder) -> None:
    code = pytest.importorskip("torch._inductor.output_code")

    class PlannedIteration(code.OutputCode):  # type: ignore[misc, name-defined]
        def __call__(self, x: Tensor) -> Tensor:
            return torch.mm(x, x)

    code.PlannedIteration = PlannedIteration
    x = torch.ones(2, 2)
    try:
        recorder.begin()
        PlannedIteration()(x)
        x.sin()
        assert names(end(recorder)) == ["sin"]
        recorder.begin()
    finally:
        del code.PlannedIteration
        recorder.end()
