"""Saved-tensor hooks belong to a thread; programs train in others, in several, and hand graphs around."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import torch
from torch import Tensor

from tests.scenarios import assert_same, batch, bits, gradients, main, moved, moving, perceptron, train
from torch_tiers.migrator.runtime import progress
from torch_tiers.migrator.saved.mover import Mover


def _in_a_thread(work: Callable[[], list[Tensor]]) -> list[Tensor]:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def training_in_a_second_thread(device: torch.device) -> None:
    assert_same(lambda device: _in_a_thread(lambda: train(perceptron(device), device)), device)


def training_in_two_threads_at_once(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        barrier = threading.Barrier(2)

        def work(seed: int) -> list[Tensor]:
            with lock:  # the seeds are global
                model = perceptron(device, seed=seed)
            barrier.wait()
            return train(model, device, steps=8)

        lock = threading.Lock()
        with ThreadPoolExecutor(2) as pool:
            return [result for results in pool.map(work, (1, 2)) for result in results]

    assert_same(program, device, room=0)


def training_in_one_thread_after_the_other(device: torch.device) -> None:
    """A thread that ends takes what was made for it along."""

    def threads() -> int:
        return threading.active_count()

    def movers() -> int:
        gc.collect()
        return sum(type(each) is Mover for each in gc.get_objects())

    with moving(room=0) as session:
        train(perceptron(device), device, steps=2)
        mine = movers()
        for i in range(20):
            _in_a_thread(lambda: train(perceptron(device), device, steps=2))
            if i == 3:
                before = threads()
        print(f"  {before} threads, later {threads()}; moved {moved(session)}")
        assert threads() <= before + 1  # one of ours may be about to end, or to begin
        until = time.monotonic() + 20
        while movers() > mine and time.monotonic() < until:  # whose plans are being made, until these are done
            time.sleep(0.1)
        assert movers() == mine, "with those go engines, and the DRAM that their plans had reserved"


def what_a_thread_left_in_dram_is_given_back(device: torch.device) -> None:
    """Its engine heard of dead groups when it was called again, which nobody does; then DRAM was full."""
    with moving(room=0, dram="64MiB") as session:
        model = perceptron(device)

        def step(i: int) -> list[Tensor]:
            model(batch(device, i)).square().mean().backward()
            model.zero_grad()
            return []

        for i in range(40):
            thread = threading.Thread(target=step, args=(i,))
            thread.start()
            thread.join()
        for i in range(6):
            step(i)
        print(f"  moved {moved(session)}")
        assert moved(session)["d2h"] > 64 << 20


def forward_in_one_thread_backward_in_another(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        model = perceptron(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        results = []
        for i in range(4):
            optimizer.zero_grad()
            loss = model(batch(device, i)).square().mean()

            def walk(loss: Tensor = loss) -> list[Tensor]:
                loss.backward()
                optimizer.step()
                return gradients(model)

            results += [loss.detach(), *_in_a_thread(walk)]
        return results

    assert_same(program, device)


def a_new_thread_for_each_forward_is_said_to_have_no_plan(device: torch.device) -> None:
    model = perceptron(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with moving(room=0) as session, mock.patch.object(progress.log, "warning") as warning:
        for i in range(progress.UNHEARD):
            (loss,) = _in_a_thread(lambda i=i: [model(batch(device, i)).square().mean()])  # type: ignore[misc]
            loss.backward()
            optimizer.step()
        assert session.stats()["iterations"] == 0
    assert ["no iteration has ended" in call.args[0] for call in warning.call_args_list] == [True]


def a_thread_that_outlives_the_session(device: torch.device) -> None:
    """It trains in two sessions, and between them; in both its tensors move."""
    with ThreadPoolExecutor(1) as pool:

        def results() -> list[bytes]:
            return bits(pool.submit(lambda: train(perceptron(device), device)).result())

        plain = results()
        for _ in range(2):
            with moving(room=0) as session:
                assert results() == plain
                print(f"  {moved(session)}")
                assert moved(session)["h2d"] > 0
            assert results() == plain


def a_graph_shared_by_two_threads(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        model = perceptron(device)
        h = model(batch(device, 0)).repeat(2, 1)
        weights = list(model.parameters())

        def walk(loss: Tensor) -> tuple[Tensor, ...]:
            return torch.autograd.grad(loss, weights, retain_graph=True)

        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(walk, [h.square().mean(), h.cos().mean()])
        return [*first, *second]

    assert_same(program, device, room=0)


if __name__ == "__main__":
    main("threads")
