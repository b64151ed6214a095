"""The double of libcufile counts what a caller must not do, and says what that was."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from ctypes import c_void_p
from pathlib import Path

import pytest
import torch

from tests.unit.fake_kvikio import Double, build, overseen
from torch_tiers.allocator.nvme.backend import BLOCK
from torch_tiers.allocator.nvme.libcufile import Descriptor, declare

SIZE = 16 * BLOCK


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Double:
    return build(tmp_path_factory.mktemp("double"))


class User:
    """Who has a file of `SIZE` bytes and as much memory registered, and makes calls as the test says."""

    def __init__(self, double: Double, directory: Path) -> None:
        double.reset()
        self.library = declare(double.library)
        whole = torch.zeros(SIZE + BLOCK, dtype=torch.uint8)
        self.memory = whole[-whole.data_ptr() % BLOCK :][:SIZE]
        self.base = self.memory.data_ptr()
        self.fd = os.open(directory / "file", os.O_RDWR | os.O_CREAT)
        os.truncate(self.fd, SIZE)
        self.file = c_void_p()
        descriptor = Descriptor(1, self.fd, None)
        assert self.library.cuFileHandleRegister(ctypes.byref(self.file), ctypes.byref(descriptor)).err == 0
        assert self.register() == 0

    def register(self, start: int = 0, size: int = SIZE) -> int:
        return int(self.library.cuFileBufRegister(self.base + start, size, 0).err)

    def deregister(self, start: int = 0) -> int:
        return int(self.library.cuFileBufDeregister(self.base + start).err)

    def forget_file(self) -> None:
        self.library.cuFileHandleDeregister(self.file)

    def read(self, size: int = BLOCK, at: int = 0, start: int = 0) -> int:
        return int(self.library.cuFileRead(self.file, self.base, size, at, start))

    def write(self, size: int = BLOCK, at: int = 0, start: int = 0) -> int:
        return int(self.library.cuFileWrite(self.file, self.base, size, at, start))


@pytest.fixture
def user(double: Double, tmp_path: Path) -> Iterator[User]:
    user = User(double, tmp_path)
    yield user
    os.close(user.fd)


def test_a_caller_who_keeps_the_rules_is_not_told_off(user: User, double: Double) -> None:
    user.memory.fill_(7)
    assert user.write(SIZE) == SIZE
    user.memory.zero_()
    assert user.read(SIZE - BLOCK, BLOCK, BLOCK) == SIZE - BLOCK
    assert int(user.memory.sum()) == 7 * (SIZE - BLOCK)
    assert user.deregister() == 0
    assert user.register() == user.deregister() == 0
    user.forget_file()
    assert double.violations == (0, "")
    assert double.left_open == 0


@pytest.mark.parametrize(("name", "transfer"), [("read", User.read), ("write", User.write)])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"size": BLOCK + 1}, "off the grid"),
        ({"size": 512}, "off the grid"),
        ({"at": 512}, "off the grid"),
        ({"start": 512}, "off the grid"),
        ({"start": SIZE}, "memory that is not registered"),
        ({"size": 2 * BLOCK, "start": SIZE - BLOCK}, "memory that is not registered"),
    ],
)
def test_a_request_off_the_grid_or_past_the_memory_is_a_violation(
    user: User, double: Double, name: str, transfer: Callable[..., int], arguments: dict[str, int], said: str
) -> None:
    double.inject(name, "lost")  # so that nothing is touched that is not the user's
    transfer(user, **arguments)
    count, first = double.violations
    assert count == 1
    assert first.startswith(f"a {name} of ") and said in first


@pytest.mark.parametrize(("name", "transfer"), [("read", User.read), ("write", User.write)])
@pytest.mark.parametrize(
    ("before", "said"),
    [(User.deregister, "memory that is not registered"), (User.forget_file, "a file that was deregistered")],
)
def test_use_after_deregistration_is_a_violation(
    user: User, double: Double, name: str, transfer: Callable[..., int], before: Callable[..., object], said: str
) -> None:
    before(user)
    assert double.violations == (0, "")
    transfer(user)
    assert double.violations == (1, f"a {name} of {said}")


@pytest.mark.parametrize(("start", "size"), [(0, SIZE), (0, BLOCK), (SIZE - BLOCK, BLOCK), (BLOCK, BLOCK)])
def test_memory_that_is_registered_twice_is_a_violation(user: User, double: Double, start: int, size: int) -> None:
    assert user.register(start, size) != 0
    assert double.violations == (1, "memory was registered twice")


@pytest.mark.parametrize("start", [0, BLOCK])
def test_memory_that_is_deregistered_twice_or_by_another_byte_is_a_violation(
    user: User, double: Double, start: int
) -> None:
    if start == 0:
        assert user.deregister() == 0
    assert user.deregister(start) != 0
    assert double.violations == (1, "memory was deregistered that is not registered")


def test_a_file_that_is_deregistered_twice_is_a_violation(user: User, double: Double) -> None:
    user.forget_file()
    user.forget_file()
    assert double.violations == (1, "a file was deregistered twice")


def test_a_driver_that_is_closed_more_often_than_opened_is_a_violation(user: User, double: Double) -> None:
    user.library.cuFileDriverOpen()
    user.library.cuFileDriverClose()
    assert double.violations == (0, "")
    user.library.cuFileDriverClose()
    assert double.violations == (1, "the driver was closed too often")


@pytest.mark.filterwarnings("default:.* is multi-threaded, use of fork")
@pytest.mark.parametrize(
    ("call", "said"),
    [
        (User.read, "read"),
        (User.write, "write"),
        (User.register, "cuFileBufRegister"),
        (User.deregister, "cuFileBufDeregister"),
        (User.forget_file, "cuFileHandleDeregister"),
    ],
)
def test_a_call_in_the_child_of_a_fork_is_a_violation_that_its_parent_sees(
    user: User, double: Double, call: Callable[[User], object], said: str
) -> None:
    if (child := os.fork()) == 0:
        try:
            call(user)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert double.violations == (1, f"{said} in the child of a fork")
    assert double.left_open == 2  # the parent's file and memory are as they were


def test_a_violation_fails_the_test_that_commits_it(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError), overseen(double, monkeypatch):
        double.library.cuFileBufDeregister(BLOCK)
