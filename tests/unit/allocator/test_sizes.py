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
    parse_share,
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


@pytest.mark.parametrize("text", ["", "much", "24GX", "24Gbit", "-1GiB", -1, "1.5", "1e9", "GiB", True, None, 1.5, "٣"])
def test_what_is_no_size_is_refused_with_what_is_accepted(text: object) -> None:
    with pytest.raises(ValueError, match="24GiB"):
        parse_size(text)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["9" * 400, int("9" * 400), f"{'9' * 400}GiB", "8388608TiB"])
def test_what_no_system_counts_in_is_no_size(text: str | int) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize("text", ["24GB", "24G", "24gb", "24000 MB", "24.0 g"])
def test_units_without_an_i_are_powers_of_a_thousand(text: str) -> None:
    assert parse_size(text) == 24_000_000_000


@pytest.mark.parametrize("text", ["24GiB", "24Gi", "24gi", "24576 Mi"])
def test_units_with_an_i_are_powers_of_1024(text: str) -> None:
    assert parse_size(text) == 24 * GiB


def test_a_share_is_written_as_it_is_read() -> None:
    share = parse_share(" 62.5 % ")
    assert share is not None
    assert (str(share), share.of(1000)) == ("62.5%", 625)
    assert parse_share("24GiB") is None


@pytest.mark.parametrize("text", ["0%", "101%"])
def test_a_share_of_nothing_or_of_more_than_all_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as 60%"):
        parse_share(text)


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
