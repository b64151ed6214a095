from __future__ import annotations

from torch_tiers.migrator.weights.order import Order


def passed(order: Order, kind: str, *reads: int) -> None:
    order.begin(kind)
    for weight in reads:
        order.read(weight)


def test_the_first_pass_expects_nothing() -> None:
    order = Order()
    passed(order, "step", 0, 1)
    assert list(order.coming()) == []
    assert order.reads_before(0) == float("inf")


def test_a_pass_is_expected_to_read_what_the_one_before_did() -> None:
    order = Order()
    passed(order, "step", 0, 1, 2, 2, 1, 0)
    passed(order, "step", 0)
    assert list(order.coming()) == [1, 2, 1, 0]
    assert [order.reads_before(weight) for weight in (0, 1, 2)] == [3, 0, 1]


def test_each_kind_of_pass_has_an_order_of_its_own() -> None:
    order = Order()
    passed(order, "step", 0, 1, 0)
    passed(order, "evaluation", 0, 1)
    passed(order, "step")
    assert list(order.coming()) == [0, 1, 0]
    passed(order, "evaluation")
    assert list(order.coming()) == [0, 1]


def test_a_read_that_was_not_expected_changes_nothing_of_what_is_and_one_that_is_left_out_is_expected_no_more() -> None:
    """As that of an expert which gets no token."""
    order = Order()
    passed(order, "step", 0, 1, 2, 3)
    passed(order, "step", 0, 7)
    assert list(order.coming()) == [1, 2, 3]
    order.read(2)
    assert list(order.coming()) == [3]


def test_a_pass_goes_on_after_one_of_another_kind_in_its_midst() -> None:
    """An evaluation between a forward and its backward."""
    order = Order()
    passed(order, "step", 0, 1, 2, 1, 0)
    passed(order, "step", 0, 1, 2)
    passed(order, "evaluation", 1, 0)
    order.resume("step")
    assert list(order.coming()) == [1, 0]
    for weight in (1, 0):
        order.read(weight)
    passed(order, "step")
    assert list(order.coming()) == [0, 1, 2, 1, 0]


def test_a_pass_without_reads_leaves_the_order_as_it_was() -> None:
    order = Order()
    passed(order, "step", 0, 1)
    passed(order, "step")
    passed(order, "step")
    assert list(order.coming()) == [0, 1]


def test_a_read_that_comes_once_more_does_not_end_what_is_expected() -> None:
    """A weight that forward reads twice now, and backward read once."""
    order = Order()
    passed(order, "step", 0, 1, 2, 3, 4, 3, 2, 1, 0)
    passed(order, "step", 0, 1, 0)
    assert list(order.coming())[:4] == [1, 2, 3, 4]


def test_nothing_is_expected_beyond_the_end_of_a_forward() -> None:
    """No copy lives longer; and one that is read after it may go first."""
    order = Order()
    for _ in range(2):
        passed(order, "step", 0, 1)
        order.end()
        order.end()  # a forward that reads nothing
        for weight in (1, 0):
            order.read(weight)
        order.end()
    passed(order, "step", 0)
    assert list(order.coming()) == [1]
    assert order.reads_before(0) == float("inf")
    order.read(1)
    assert list(order.coming()) == []
    order.end()
    assert list(order.coming()) == []
    order.end()
    assert list(order.coming()) == [1, 0]


def test_a_read_tells_whether_it_was_expected() -> None:
    order = Order()
    passed(order, "step", 0, 1)
    order.begin("step")
    assert [order.read(weight) for weight in (1, 7, 7, 0)] == [True, False, False, True]
