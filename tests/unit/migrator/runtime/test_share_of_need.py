"""A budget that is a share of what the program needs, which its first plan tells."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

import torch_tiers as tiers
from tests.scenarios import batch, bits, gradients, perceptron, train
from torch_tiers.assembly import Session

CPU = torch.device("cpu")
DEPTH, STEPS = 8, 12


def open_session(hbm: str) -> tiers.session:
    return tiers.session(allocator="torch", hbm=hbm, dram="256MiB", plan_cache=False)


def trained() -> list[bytes]:
    torch.manual_seed(0)
    return bits(train(perceptron(CPU, depth=DEPTH), CPU, steps=STEPS))


def predicted_peak(session: Session) -> int:
    saver = session.runtime.saver()
    assert saver is not None
    (mover,) = saver.movers.armed
    (predicted,) = mover.learner.predictions
    assert predicted is not None
    return predicted.peak["hbm"]


def budget(session: Session) -> int:
    return int(session.stats()["budget"]["hbm"])


@pytest.fixture(scope="module")
def plain() -> list[bytes]:
    return trained()


@pytest.fixture(scope="module")
def needed() -> int:
    with open_session("all") as session:
        trained()
        return predicted_peak(session)


def test_plans_keep_to_the_share_and_results_are_the_same(plain: list[bytes], needed: int) -> None:
    with open_session("60%") as session:
        assert trained() == plain
        assert budget(session) == pytest.approx(0.6 * needed, rel=0.01)
        assert predicted_peak(session) <= budget(session)


def test_what_was_recorded_with_all_of_the_memory_is_not_recorded_again() -> None:
    def recorded(hbm: str) -> list[bool]:
        """For each step, whether it was recorded."""
        found = []
        with open_session(hbm) as session:
            model = perceptron(CPU, depth=DEPTH)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            for i in range(STEPS):
                model(batch(CPU, i)).square().mean().backward()
                saver = session.runtime.saver()
                assert saver is not None
                found.append(saver.place.recording)
                optimizer.step()
                optimizer.zero_grad()
        return found

    assert recorded("60%") == recorded("all")


def test_until_the_first_plan_it_has_all(needed: int) -> None:
    with open_session("60%") as session:
        perceptron(CPU, depth=DEPTH)(torch.randn(16, 128)).sum().backward()
        assert budget(session) > 10 * needed


def test_that_no_step_of_an_optimizer_told_what_is_needed_is_said(caplog: pytest.LogCaptureFixture) -> None:
    said = "hbm.capacity = 60% had no effect"
    with open_session("60%") as session:
        model = perceptron(CPU, depth=DEPTH)
        for i in range(STEPS):
            model(batch(CPU, i)).square().mean().backward()
        assert session.stats()["budget_share"] is None
    assert said in caplog.text
    caplog.clear()
    with open_session("60%") as session:
        trained()
        assert session.stats()["budget_share"] == "60%"
    assert said not in caplog.text


def test_a_graph_from_before_that_is_alive_comes_back_as_it_was() -> None:
    def program() -> list[Tensor]:
        model = perceptron(CPU, depth=DEPTH)
        early = model(torch.randn(2048, 128, generator=torch.Generator().manual_seed(7))).square().mean()
        other = perceptron(CPU, depth=DEPTH, seed=1)
        results = train(other, CPU, steps=STEPS)
        early.backward()
        return [*results, *gradients(model)]

    expected = bits(program())
    with open_session("60%"):
        assert bits(program()) == expected


def test_weights_that_the_share_does_not_hold_are_streamed() -> None:
    def program() -> list[Tensor]:
        model = perceptron(CPU, width=512, depth=DEPTH)
        *frozen, last = model.parameters()
        for parameter in frozen:
            parameter.requires_grad_(False)
        optimizer = torch.optim.SGD([last], lr=1e-3)
        losses = []
        for i in range(STEPS):
            loss = model(batch(CPU, i, width=512)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    expected = bits(program())
    with open_session("60%") as session:
        assert bits(program()) == expected
        assert session.runtime.numbers()["streamed_weights"] > budget(session)


def test_every_thread_keeps_to_the_share(plain: list[bytes], needed: int) -> None:
    with open_session("60%") as session:
        seen: list[tuple[bool, int]] = []

        def work() -> None:
            for _ in range(2):
                same = trained() == plain
            seen.append((same, predicted_peak(session)))

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
            thread.join()
        assert all(same and peak <= budget(session) for same, peak in seen), seen
        assert len(seen) == 2


@pytest.mark.parametrize("early", [1, 2, 3])
def test_a_thread_that_has_recorded_little_by_then_learns_anew(early: int) -> None:
    """Also if it has recorded nothing that counts, as before an optimizer's step."""
    others_plan, begun = threading.Event(), threading.Event()

    def program() -> list[Tensor]:
        model = perceptron(CPU, depth=DEPTH, seed=1)
        results = []
        for i in range(STEPS):
            if i == early:
                begun.set()
                others_plan.wait()
            model(batch(CPU, i)).square().mean().backward()
            results += gradients(model)
            model.zero_grad()
        return results

    others_plan.set()
    expected = bits(program())
    others_plan.clear()
    begun.clear()
    results: list[Tensor] = []
    with open_session("60%") as session:
        thread = threading.Thread(target=lambda: results.extend(program()))
        thread.start()
        begun.wait(60)
        trained()
        others_plan.set()
        thread.join()
        assert session.stats()["budget_share"] == "60%"
    assert bits(results) == expected
