"""Optimizer state for which DRAM has no room lies on NVMe, and steps are plain PyTorch's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn, optim

from tests.unit.by_hand import raising
from torch_tiers.allocator.errors import TiersError
from torch_tiers.allocator.host.dram import DramArena
from torch_tiers.allocator.nvme.store import NvmeStore
from torch_tiers.allocator.pages import StateRoom
from torch_tiers.allocator.sizes import KiB, MiB
from torch_tiers.migrator.offload.backing import Backing
from torch_tiers.migrator.program.by_parameter import BY_ELEMENT
from torch_tiers.migrator.runtime import nvme_placement, streamed_state
from torch_tiers.migrator.runtime.devices import Device, lanes
from torch_tiers.migrator.runtime.nvme_placement import NvmePlacement
from torch_tiers.migrator.runtime.streamed_state import StreamedState
from torch_tiers.migrator.state import chunks, parameter_state, slices
from torch_tiers.migrator.state.nvme_tensor import NvmeBytes, NvmeTensor
from torch_tiers.migrator.streams.host import HostCompute
from torch_tiers.migrator.telemetry.counters import Counters

CPU = torch.device("cpu")
SIZES = [(40, 50), (300,), (1100,), (7, 9, 11), (2048,)]


class Pages:
    """An allocator whose HBM and DRAM lack room for `beyond` bytes of state."""

    state_in_dram = 0

    def __init__(self, beyond: int) -> None:
        self.beyond = beyond
        self.left = 0

    def state_without_room(self, rooms: object) -> dict[int | None, int]:
        return {CPU.index: self.beyond} if self.beyond > 0 else {}

    def limit(self, device: torch.device) -> int:
        return 0

    def release_dram(self, device: int | None, nbytes: int) -> int:
        self.left += nbytes
        return nbytes


class Program:
    """Trains some parameters, as under tiers."""

    def __init__(
        self, path: Path, kind: type[optim.Optimizer] = optim.AdamW, beyond: int = 1 << 30, **how: Any
    ) -> None:
        self.parameters = parameters()
        self.optimizer = kind(self.parameters, **how)  # type: ignore[call-arg]
        counters = Counters()
        compute = HostCompute(counters)
        self.device = Device(compute, *lanes(CPU, ("d2h", "h2d"), counters), 1 * MiB)
        self.arena = DramArena(32 * MiB, pinned=False, step=32 * MiB)
        self.store = NvmeStore([path], 64 * MiB, gds="off", step=16 * MiB)
        self.backing = Backing(self.arena, self.store, counters)
        self.pages = Pages(beyond)
        devices: Any = SimpleNamespace(
            opened={CPU: self.device}, open=lambda *_: self.device, backing=lambda _: self.backing
        )
        options: Any = SimpleNamespace(pages=lambda: self.pages)
        self.nvme = NvmePlacement(lambda: options, devices, counters)
        self.steps = StreamedState(lambda: options, devices, counters, lambda _: frozenset(), self.nvme)
        self.interrupted_at = 0  # updates of parts, or of slices, from now; 0: never

    def expect(self) -> None:
        nbytes = 2 * sum(parameter.nbytes for parameter in self.parameters)
        self.nvme.expect(self.optimizer, self.pages, {CPU.index: StateRoom(0, nbytes)})  # type: ignore[arg-type]

    def train(self, steps: range) -> None:
        for number in steps:
            set_gradients(self.parameters, number)
            if number == 0:
                self.expect()
            self.steps(self.optimizer, self._step)

    def _step(self, part: optim.Optimizer) -> Any:
        self.interrupted_at -= 1
        if self.interrupted_at == 0:
            raise KeyboardInterrupt
        return type(part).step(part)  # type: ignore[call-arg]

    @property
    def on_nvme(self) -> list[NvmeTensor]:
        state = self.optimizer.state.values()
        return [value for of in state for value in of.values() if isinstance(value, NvmeTensor)]

    def close(self) -> None:
        self.steps.close()
        self.nvme.close()
        self.backing.close()
        self.store.close()
        self.arena.close()


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(size)) for size in SIZES]


def set_gradients(of: list[nn.Parameter], number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for place, parameter in enumerate(of):
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = None if (number + place) % 4 == 3 else gradient  # some have none now and then


def plain(kind: type[optim.Optimizer], steps: int, **how: Any) -> tuple[list[nn.Parameter], optim.Optimizer]:
    trained = parameters()
    optimizer = kind(trained, **how)  # type: ignore[call-arg]
    for number in range(steps):
        set_gradients(trained, number)
        optimizer.step()
    return trained, optimizer


def numbers(optimizer: optim.Optimizer) -> list[Tensor]:
    """All of its state."""
    return [value.clone() for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]


def same(these: list[Tensor], those: list[Tensor]) -> bool:
    return len(these) == len(those) > 0 and all(map(torch.equal, these, those))


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    with (
        mock.patch.object(parameter_state, "LEAST", 64),
        mock.patch.object(slices, "SLICE", 4 * KiB),
        mock.patch.object(slices, "NUMBERS", 512),
        mock.patch.object(streamed_state, "SLICE", 4 * KiB),
        mock.patch.object(streamed_state, "AT_ONCE", 8 * KiB),
        mock.patch.object(chunks, "ALIGNED", 256),
        mock.patch.object(nvme_placement, "IN_TRANSIT", 0),
    ):
        yield


HOW: dict[type[optim.Optimizer], dict[str, Any]] = {
    optim.SGD: {"momentum": 0.9},
    optim.RMSprop: {"momentum": 0.5, "centered": True},
}


@pytest.mark.parametrize("kind", BY_ELEMENT, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("foreach", [True, False])
def test_steps_are_plains(kind: type[optim.Optimizer], foreach: bool, tmp_path: Path) -> None:
    how = {"lr": 0.01, "foreach": foreach, **HOW.get(kind, {})}
    program = Program(tmp_path, kind, **how)
    program.train(range(6))
    trained, optimizer = plain(kind, 6, **how)
    assert program.nvme.nbytes == sum(tensor.nbytes for tensor in program.on_nvme)
    assert len(program.on_nvme) >= len(SIZES) or kind is optim.Adagrad, "which makes its state before any step"
    assert same(list(map(torch.clone, program.parameters)), list(map(torch.clone, trained)))
    before = len(program.on_nvme)
    assert same(numbers(program.optimizer), numbers(optimizer))
    assert len(program.on_nvme) == before, "what was looked at is still there"
    program.close()


def test_as_much_goes_as_has_no_room(tmp_path: Path) -> None:
    some = 9 * KiB
    program = Program(tmp_path, beyond=some)
    program.train(range(3))
    gone = sum(tensor.nbytes for tensor in program.on_nvme)
    assert some <= gone < some + 2 * max(parameter.nbytes for parameter in program.parameters)
    assert same(numbers(program.optimizer), numbers(plain(optim.AdamW, 3)[1]))
    program.close()


def test_what_an_optimizer_does_not_make_needs_no_room(tmp_path: Path) -> None:
    """Two tensors for each parameter are expected; SGD makes one."""
    total = sum(parameter.nbytes for parameter in parameters())
    program = Program(tmp_path, optim.SGD, beyond=total, momentum=0.9)
    program.train(range(3))
    assert not program.on_nvme
    program.close()


def test_what_dram_has_room_for_stays(tmp_path: Path) -> None:
    program = Program(tmp_path, beyond=0)
    program.train(range(2))
    assert not program.on_nvme
    assert program.pages.left == 0
    program.close()


def test_state_is_saved_and_loaded_without_being_in_memory(tmp_path: Path) -> None:
    program, other = Program(tmp_path), Program(tmp_path)
    program.train(range(3))
    torch.save(program.optimizer.state_dict(), tmp_path / "saved")
    assert len(program.on_nvme) == 2 * len(SIZES)
    saved = torch.load(tmp_path / "saved", weights_only=True)
    with torch.no_grad():
        for parameter, trained in zip(other.parameters, program.parameters, strict=True):
            parameter.copy_(trained)
    other.expect()
    for index, state in saved["state"].items():
        parameter = other.parameters[index]
        other.optimizer.state[parameter] = {
            name: other.nvme.put_loaded(other.optimizer, parameter, value) for name, value in state.items()
        }
    assert len(other.on_nvme) == 2 * len(SIZES)
    other.train(range(3, 6))
    assert same(numbers(other.optimizer), numbers(plain(optim.AdamW, 6)[1]))
    program.close()
    other.close()


def test_what_a_program_writes_counts_in_the_next_step(tmp_path: Path) -> None:
    program, (trained, optimizer) = Program(tmp_path), plain(optim.AdamW, 2)
    program.train(range(2))
    for of in (program.optimizer.state[program.parameters[0]], optimizer.state[trained[0]]):
        of["exp_avg"][1:3].mul_(0.5)
    program.train(range(2, 4))
    for number in range(2, 4):
        set_gradients(trained, number)
        optimizer.step()
    assert same(numbers(program.optimizer), numbers(optimizer))
    program.close()


def test_what_the_program_has_a_view_of_stays_in_memory(tmp_path: Path) -> None:
    program, (trained, optimizer) = Program(tmp_path), plain(optim.AdamW, 2)
    program.train(range(2))
    kept = program.optimizer.state[program.parameters[0]], optimizer.state[trained[0]]
    views = [[of[name][1:3] for name in ("exp_avg", "exp_avg_sq")] for of in kept]
    for number in range(2, 4):
        program.train(range(number, number + 1))
        set_gradients(trained, number)
        optimizer.step()
        for view in (*views[0], *views[1]):
            view.mul_(0.5)
    assert same(numbers(program.optimizer), numbers(optimizer))
    program.close()


def test_what_is_written_in_inference_mode_is_updated_later(tmp_path: Path) -> None:
    program = Program(tmp_path)
    program.train(range(2))
    with torch.inference_mode():
        program.on_nvme[0].mul_(1.0)
    program.train(range(2, 3))
    assert same(numbers(program.optimizer), numbers(plain(optim.AdamW, 3)[1]))
    program.close()


def test_state_is_brought_back_before_the_session_ends(tmp_path: Path) -> None:
    program = Program(tmp_path)
    program.train(range(3))
    saved = program.optimizer.state_dict()
    program.nvme.bring_back()
    assert not program.on_nvme
    program.close()
    trained, optimizer = plain(optim.AdamW, 5)
    for number in range(3, 5):
        set_gradients(program.parameters, number)
        program.optimizer.step()
    assert same(program.parameters, trained)  # type: ignore[arg-type]
    assert same(numbers(program.optimizer), numbers(optimizer))
    kept = saved["state"][0]["exp_avg"]
    assert torch.equal(kept + 0, program.optimizer.state[program.parameters[0]]["exp_avg"]), "who has it has the same"


def test_state_that_memory_has_no_room_for_as_the_session_ends_is_lost_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = Program(tmp_path)
    program.train(range(2))
    with mock.patch.object(NvmeBytes, "read", raising(torch.OutOfMemoryError, "out of memory")):
        program.nvme.bring_back()
    program.close()
    assert "Save it within the session" in caplog.text
    with pytest.raises(TiersError, match="session is over"):
        program.optimizer.step()


def test_an_optimizer_whose_steps_are_not_made_in_parts_keeps_its_state_in_memory(tmp_path: Path) -> None:
    program = Program(tmp_path, differentiable=True)
    program.expect()
    assert not program.nvme.lacks_room(program.optimizer)
    program.close()


def test_a_buffer_for_one_slice_is_enough(tmp_path: Path) -> None:
    program = Program(tmp_path)
    program.train(range(1))
    plain_empty, refused = HostCompute.empty, list[int]()

    def empty(compute: HostCompute, nbytes: int) -> Tensor:
        if nbytes > 4 * KiB:
            refused.append(nbytes)
            raise torch.OutOfMemoryError
        return plain_empty(compute, nbytes)

    with mock.patch.object(HostCompute, "empty", empty):
        program.train(range(1, 3))
    assert refused
    assert same(numbers(program.optimizer), numbers(plain(optim.AdamW, 3)[1]))
    program.close()


def test_dram_is_left_for_transfers_and_for_iterations(tmp_path: Path) -> None:
    program = Program(tmp_path, beyond=1)
    with mock.patch.object(Pages, "limit", lambda *_: 400), mock.patch.object(nvme_placement, "IN_TRANSIT", 1000):
        program.expect()
    assert program.pages.left == 1100
    program.close()


def test_a_step_that_is_interrupted_leaves_each_part_as_it_was_or_updated(tmp_path: Path) -> None:
    program = Program(tmp_path)
    program.train(range(2))
    before = numbers(program.optimizer)
    program.interrupted_at = 3
    with pytest.raises(KeyboardInterrupt):
        program.train(range(2, 3))
    after = numbers(program.optimizer)
    updated = numbers(plain(optim.AdamW, 3)[1])
    for old, now, new in zip(before, after, updated, strict=True):
        parts = zip(*(tensor.flatten().split(512) for tensor in (old, now, new)), strict=True)
        assert all(torch.equal(is_, was) or torch.equal(is_, becomes) for was, is_, becomes in parts)
    program.close()


def test_where_nvme_is_full_the_rest_stays_and_it_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = Program(tmp_path)
    with mock.patch.object(program.backing, "new", side_effect=nvme_placement.TierFull("nvme", "here", 9, 8, 8)):
        program.train(range(2))
    assert not program.on_nvme
    assert len(caplog.records) == 1
    assert same(numbers(program.optimizer), numbers(plain(optim.AdamW, 2)[1]))
    program.close()
