"""HBM beyond the budget, for the steps before there is a plan."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torch_tiers.migrator.runtime.loans import Loans

GPU = torch.device("cuda", 0)
BUDGET, FREE = 100, 40


class Lender:
    """An allocator with HBM that is free beyond its budget."""

    def __init__(self, free: int = FREE) -> None:
        self.free = free
        self.lent: list[int] = []

    def free_beyond(self, device: torch.device) -> int:
        return 0 if self.lent else self.free

    def lend(self, device: torch.device, nbytes: int) -> None:
        self.lent.append(nbytes)


def take(loans: Loans, pages: Lender | None, dram: int = 0, *, disk: bool = True, strict: bool = False) -> int:
    backing: Any = SimpleNamespace(has_disk=disk, dram_capacity=dram)
    lender: Any = pages
    return loans.take(GPU, BUDGET, backing, lender, strict=strict)


def test_threads_of_a_gpu_share_what_is_lent_and_the_last_one_pays_it_back() -> None:
    """The second one found nothing free, and so took the first one's back."""
    loans, lender = Loans(), Lender()
    assert [take(loans, lender) for _ in range(2)] == [FREE, FREE]
    loans.pay_back(GPU)
    assert lender.lent == [FREE]
    loans.pay_back(GPU)
    assert lender.lent == [FREE, 0]


def test_what_is_lent_still_ends_with_the_session() -> None:
    loans, lender = Loans(), Lender()
    take(loans, lender)
    loans.close()
    assert lender.lent == [FREE, 0]


@pytest.mark.parametrize("dram", [BUDGET // 4 - 1, BUDGET // 4, FREE - 1])
def test_hbm_is_lent_where_dram_holds_less_than_is_free(dram: int) -> None:
    """A quarter of the budget was taken for enough DRAM, where a GPT saved half as much again as its budget."""
    assert take(Loans(), Lender(), dram) == FREE


def test_nothing_is_lent_where_no_drive_would_have_to_take_it() -> None:
    assert take(Loans(), Lender(), dram=FREE) == 0, "DRAM takes whatever would have fitted"
    assert take(Loans(), Lender(), disk=False) == 0


@pytest.mark.parametrize("strict, pages", [(True, Lender()), (False, None), (False, Lender(free=0))])
def test_steps_that_may_go_to_the_drive_are_told_of_once(
    strict: bool, pages: Lender | None, caplog: pytest.LogCaptureFixture
) -> None:
    """They took twenty seconds each, and nothing was said."""
    loans = Loans()
    assert [take(loans, pages, strict=strict) for _ in range(2)] == [0, 0]
    (told,) = caplog.messages
    assert told.startswith("until there is a plan, steps may offload to nvme")


def test_a_loan_is_told_of_where_another_gpu_had_none_to_give(caplog: pytest.LogCaptureFixture) -> None:
    loans = Loans()
    assert (take(loans, Lender(free=0)), take(loans, Lender())) == (0, FREE)
    assert [text.split(", ")[1][:13] for text in caplog.messages] == ["steps may off", "steps may use"]


def test_nothing_is_told_where_dram_takes_what_the_first_steps_save(caplog: pytest.LogCaptureFixture) -> None:
    take(Loans(), Lender(), dram=2 * BUDGET, strict=True)
    assert not caplog.messages
