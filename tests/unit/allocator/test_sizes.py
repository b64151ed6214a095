from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_tiers.allocator.errors import CorruptionError, StoreError, TierFull, TiersError
from torch_tiers.allocator.holders import Holder
from torch_tiers.allocator.sizes import (
    GiB,
    KiB,
    MiB,
    TiB,
    format_at_least,
    format_size,
    likely_size,
    parse_size,
    round_up,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("24GiB", 24 * GiB),
        ("512 MiB", 512 * MiB),
        ("1.5GiB", 3 * GiB // 2),
        ("4096", 4096),
        (4096, 4096),
        (" 2 tib ", 2 * TiB),
        ("7B", 7),
        ("0", 0),
        ("0.3KiB", 307),
    ],
)
def test_a_size_is_read(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "much", "24GB", "24 G", "-1GiB", -1, "1.5", "1e9", "GiB", True, None, 1.5, "٣"])
def test_what_is_no_size_is_refused_with_what_is_accepted(text: object) -> None:
    with pytest.raises(ValueError, match="24GiB"):
        parse_size(text)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["9" * 400, int("9" * 400), f"{'9' * 400}GiB", "8388608TiB"])
def test_what_no_system_counts_in_is_no_size(text: str | int) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize("text", ["24GB", "24G", "24gb", "24 Gi", " 24g "])
def test_a_unit_that_is_nearly_right_is_guessed(text: str) -> None:
    with pytest.raises(ValueError, match=r"did you mean 24GiB\?"):
        parse_size(text)


@pytest.mark.parametrize("text", ["24", "24GX", "24Gbit", "much", "24b", 24])
def test_what_is_not_nearly_right_is_not_guessed(text: object) -> None:
    assert likely_size(text) is None


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KiB, "1.0 KiB"),
        (int(23.4 * GiB), "23.4 GiB"),
        (MiB - 1, "1.0 MiB"),
        (5000 * TiB, "5000.0 TiB"),
        (-3 * MiB, "-3.0 MiB"),
    ],
)
def test_a_size_is_written_in_its_largest_unit(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


@given(st.integers(0, 2**60))
def test_a_written_size_reads_back_within_its_last_digit(nbytes: int) -> None:
    assert abs(parse_size(format_size(nbytes)) - nbytes) <= nbytes / 10 + 1


@given(st.integers(0, 2**60), st.integers(1, 2**40))
def test_rounding_up_is_the_nearest_multiple_above(n: int, to: int) -> None:
    assert round_up(n, to) % to == 0
    assert 0 <= round_up(n, to) - n < to


def test_a_full_tier_names_itself_and_sizes() -> None:
    error = TierFull("nvme", "/mnt/a", 3 * GiB, 399 * GiB, 400 * GiB)
    assert all(part in str(error) for part in ("nvme", "/mnt/a", "3.0 GiB", "399.0 GiB", "400.0 GiB"))


@pytest.mark.parametrize(
    "error",
    [
        TierFull("dram", None, 1, 2, 3),
        TierFull("dram", None, 1, 2, 3, (Holder(4, 5, "train.py"),)),
        StoreError("/a", 0, 4096, "read", "I/O error"),
        CorruptionError("/a", 0, 1, "read", "x"),
    ],
)
def test_errors_survive_pickling(error: TiersError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


@given(st.integers(0, 1 << 62))
def test_what_is_needed_at_least_is_not_printed_as_less(nbytes: int) -> None:
    text = format_at_least(nbytes)
    assert nbytes <= parse_size(text) <= nbytes * 1.1 + 1
