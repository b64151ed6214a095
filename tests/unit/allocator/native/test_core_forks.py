"""A fork has its parent's cores by name only: it neither waits for them nor changes what they hold."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from torch_tiers.allocator.native import Core, CoreError
from torch_tiers.allocator.sizes import MiB

pytestmark = pytest.mark.filterwarnings("default:.* is multi-threaded, use of fork")


def fork() -> int:
    if (child := os.fork()) == 0:
        signal.alarm(20)  # kills one that hangs
    return child


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_child_frees_what_it_inherited_and_the_parent_has_it_still(core: Core) -> None:
    block = core.allocate(8 * MiB)
    if (child := fork()) == 0:
        core.free(block)
        try:
            core.allocate(MiB)
        except CoreError as error:
            os._exit("its parent's" not in str(error))
        os._exit(2)
    assert exit_code(child) == 0
    assert core.counts().hbm == 8 * MiB
    core.free(block)


def test_a_child_has_cores_of_its_own(core: Core) -> None:
    if (child := fork()) == 0:
        own = Core("memfd", 64 * MiB, 0)
        own.free(own.allocate(8 * MiB))
        own.close()
        core.close()
        os._exit(0)
    assert exit_code(child) == 0


def test_forks_while_others_allocate_do_not_hang(core: Core) -> None:
    """A DataLoader's worker that releases a tensor, forked while another thread was within the core."""
    inherited, over = core.allocate(2 * MiB), threading.Event()

    def work() -> None:
        while not over.is_set():
            core.free(core.allocate(MiB))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(100):
            if (child := fork()) == 0:
                core.free(inherited)
                os._exit(0)
            assert exit_code(child) == 0
    finally:
        over.set()
        for thread in threads:
            thread.join()
