"""Where nothing runs nothing is recorded; and whatever else PyTorch can do stays right while it is."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

from tests.unit.migrator.tape.records import Taped, names, short
from torch_tiers.migrator.tape import check
from torch_tiers.migrator.tape.recorder import Recorder, load
from torch_tiers.places import cache_directory

SEES_INTO_MODES = TorchVersion(torch.__version__) >= "2.12"
"""Whether operators come by that a dispatch mode calls, or a subclass with one of its own."""


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
    assert set(names(recorder)) <= {"zeros"}


def test_export_is_the_same(recorder: Recorder) -> None:
    model = nn.Linear(3, 3)
    recorder.begin()
    exported = torch.export.export(model, (torch.ones(2, 3),))
    recorder.stop()
    assert [str(node.target) for node in exported.graph.nodes if node.op == "call_function"] == ["aten.linear.default"]


def test_transforms_are_right_and_their_real_operators_are_recorded(recorder: Recorder) -> None:
    x = torch.arange(6.0).reshape(2, 3)

    def gradients() -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda row: row.sin().sum()))(x)

    expected = gradients()
    recorder.begin()
    found = gradients()
    listed = recorder.listed() or []
    recorder.stop()
    assert torch.equal(found, expected)
    assert [shapes for name, shapes in listed if name == "aten::cos"] == [[(2, 3)]]


def test_operators_on_what_a_wrapper_has_are_recorded(recorder: Recorder) -> None:
    x = Wrapper(torch.ones(3))
    taped = Taped(recorder)
    y = (x + 1).sin()
    assert taped.packs.find(y, recorder.settings(), lambda storage: True) is None
    if SEES_INTO_MODES:
        assert short(taped.find(y.inner)) == ["add", "sin"]
    assert [each for each in names(recorder) if each != "detach"] == (["add.Tensor", "sin"] if SEES_INTO_MODES else [])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "make", [lambda: torch.eye(3).to_sparse(), lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])]
)
def test_sparse_and_nested_tensors_are_recorded_and_not_made_again(recorder: Recorder, make: Any) -> None:
    x = make()
    expected = x * 2
    taped = Taped(recorder)
    found = x * 2
    dense = found.to_dense() if found.is_sparse else found[1].clone()
    assert torch.equal(dense, expected.to_dense() if found.is_sparse else expected[1])
    assert taped.find(dense) is None
    assert "mul.Tensor" in names(recorder)


def test_inference_tensors_which_count_no_versions_are_made_again(recorder: Recorder) -> None:
    taped = Taped(recorder)
    with torch.inference_mode():
        x = torch.ones(3)
        x.add_(1)
        y = x.sin()
        taped.made_again(x, y)
    assert short(taped.find(y)) == ["ones", "add_", "sin"]


def test_record_that_ends_within_a_mode_is_over(recorder: Recorder) -> None:
    with torch.inference_mode():
        recorder.begin()
        recorder.stop()
    recorder.begin()
    with torch.inference_mode():
        recorder.stop()
    torch.ones(3)
    assert not torch._C._dispatch_tls_is_dispatch_key_included("Fake")


def test_backward_is_recorded_again_where_it_is_run_again(recorder: Recorder) -> None:
    x = torch.ones(3, requires_grad=True)
    recorder.begin()
    loss = x.sin().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert names(recorder).count("cos") == 2


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
    assert all(map(torch.equal, found, expected))
    assert names(recorder).count("pow.Tensor_Scalar") >= 4  # of the function, and of its derivatives


def test_what_a_checkpoint_computes_again_is_recorded(recorder: Recorder) -> None:
    x = torch.ones(3, requires_grad=True)
    recorder.begin()
    y = checkpoint(lambda: x.sin().cos(), use_reentrant=False)
    assert isinstance(y, Tensor)
    y.sum().backward()
    assert names(recorder).count("sin") == 3  # the derivative of cos is one, too


def test_nothing_is_found_in_a_record_that_an_operator_of_another_has_run_into(recorder: Recorder) -> None:
    """As those of a backward do that raised in one of its threads: nobody counts what it writes then."""
    x = torch.zeros(3)

    def write(x: Tensor) -> None:
        recorder.stop()
        recorder.begin()
        x.add_(1)

    with torch.library._scoped_library("tiers_reach", "FRAGMENT") as library:
        library.define("write(Tensor(a!) x) -> ()")
        library.impl("write", write, "CPU")
        recorder.begin()
        torch.ops.tiers_reach.write(x)
    packs = recorder.packs()
    assert packs.find(x.sin(), recorder.settings(), lambda storage: True) is None and recorder.listed() is None
    recorder.stop()
    taped = Taped(recorder)
    taped.made_again(x.sin())
    assert names(recorder) == ["sin"], "the next one is sound"


def test_what_comes_by_is_decided_before_any_thread_records_and_not_once_more(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that took views while another session was opened met PyTorch's assertion."""

    def decide(*_: object) -> None:
        raise AssertionError("a thread may be at work")

    monkeypatch.setattr(check, "check", decide)
    monkeypatch.setattr(Recorder, "hide_views", decide)
    assert isinstance(load(cache_directory()), Recorder)


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
            found = [each for each in names(recorder) if each != "detach"]
            assert found[:5] == ["sin", "sum", "ones_like", "cos", "mul.Tensor"] and len(found) <= 6
    finally:
        stop.set()
        thread.join()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork_records_nothing(recorder: Recorder) -> None:
    recorder.begin()
    x = torch.ones(3)
    child = os.fork()
    if child == 0:
        os._exit(int(recorder.is_recording or float(x.add_(1).sum()) != 6 or recorder.listed() is not None))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    x.sin()
    assert names(recorder) == ["ones", "sin"]


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
    assert listings[0] == listings[1]
    assert [each for each in names(recorder) if each == "mm"] == ["mm"] * (3 if SEES_INTO_MODES else 0)


def test_write_in_a_mode_of_the_program_s_is_known(recorder: Recorder) -> None:
    from torch_tiers.migrator.tape.check import Listing

    x = torch.ones(3)
    taped = Taped(recorder)
    before = x.sin()
    closure = taped.find(before)
    assert closure is not None
    with Listing():
        x.mul_(2)
    taped.note(x)
    taped.made_again(x.cos())
    recorder.stop()
    assert closure.is_stale and torch.equal(*closure.make([]), before)


def test_operator_of_the_program_s_own_is_one_operator(recorder: Recorder) -> None:
    @torch.library.custom_op("tape_tests::double_", mutates_args=("x",))
    def double_(x: Tensor) -> None:
        x.mul_(2)
        x.add_(0)

    taped = Taped(recorder)
    x = torch.ones(3)
    double_(x)
    y = x.sin()
    assert taped.find(x) is None and taped.find(y) is None, "it wrote it, and is not run again"
    assert names(recorder) == ["ones", "tape_tests::double_", "sin"]


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
    taped = Taped(recorder)
    found = product(x)
    y = found.sin()
    assert taped.find(y, x) is None and short(taped.find(y, found)) == ["sin"]
    assert names(recorder) == ["sin"]
    assert torch.equal(found, expected) and compilations == 1
    recorder.begin()
    torch.compile(lambda x: x.cos(), backend=backend)(x)
    assert names(recorder) == [] and compilations == 2


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
        assert names(recorder) == ["sin"]
        recorder.begin()
    finally:
        del code.PlannedIteration
        recorder.stop()
