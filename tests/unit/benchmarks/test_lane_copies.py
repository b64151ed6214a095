"""The benchmark of lanes without a GPU: what it asks for, what it makes of the times, and what it decides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import lane_copies
from benchmarks.alternate import Ratio
from benchmarks.lane_copies import (
    MIXED,
    ONE,
    PLAIN,
    SEVERAL,
    SPLIT,
    Memory,
    Ours,
    Plain,
    Row,
    demands,
    pieces_of,
    rows,
    table,
)
from torch_tiers.allocator.sizes import KiB, MiB
from torch_tiers.migrator.runtime.devices import open_device
from torch_tiers.migrator.streams.pieces import SLOT
from torch_tiers.migrator.telemetry.counters import Counters

CPU = torch.device("cpu")


def memory(nbytes: int = 16 * MiB) -> Memory:
    """Not at the begin of its storage, as a block of the arena."""
    return Memory({lane: torch.empty(nbytes + 4096, dtype=torch.uint8)[4096:] for lane in ("d2h", "h2d")}, CPU)


@pytest.mark.parametrize("lane", ["d2h", "h2d"])
@pytest.mark.parametrize("name", [ONE, *SPLIT])
def test_our_lanes_bring_every_byte(lane: str, name: str) -> None:
    moved = memory()
    way = Ours(open_device(CPU, Counters(), 0), moved, name)
    for size in (4 * MiB, 16 * MiB):
        way.copy(lane, 16 * MiB, size, way.begin()).synchronize()
        assert moved.arrived(lane)
        assert not moved.arrived(lane)  # which spoiled it


def test_a_group_leaves_in_storages_of_its_own() -> None:
    way = Ours(open_device(CPU, Counters(), 0), memory(), SEVERAL)
    pieces = way.groups["d2h"][16 * MiB, 0]
    assert [piece.nbytes for piece in pieces] == [2 * MiB] * 8
    assert len({piece.source.data_ptr() for piece in pieces}) == 8
    assert len({piece.target.data_ptr() for piece in pieces}) == 1
    assert [piece.nbytes for piece in way.groups["d2h"][4 * MiB, 4 * MiB]] == [MiB] * 4


@pytest.mark.parametrize("size", lane_copies.SIZES)
@pytest.mark.parametrize("name", [ONE, *SPLIT])
def test_pieces_fill_their_group_slot_by_slot(name: str, size: int) -> None:
    pieces = pieces_of(name, size)
    assert sum(pieces) == size and all(nbytes % SLOT == 0 for nbytes in pieces)


def test_mixed_pieces_are_small_and_large() -> None:
    assert pieces_of(MIXED, 4 * MiB) == [64 * KiB, 3 * MiB, 512 * KiB, 448 * KiB]


class Stream:
    """Stands in for a stream: whatever is asked for happens at once."""

    waited: object = None

    def wait_event(self, event: object) -> None:
        self.waited = event

    def record_event(self) -> str:
        return "recorded"


@pytest.mark.parametrize("lane", ["d2h", "h2d"])
@pytest.mark.parametrize("chunk", [None, MiB])
def test_plain_copies_bring_every_byte_after_the_start(lane: str, chunk: int | None) -> None:
    moved, stream = memory(), Stream()
    start: object = object()
    way = Plain(moved, {lane: stream}, chunk)  # type: ignore[dict-item]
    assert way.copy(lane, 16 * MiB, 4 * MiB, start) == "recorded"  # type: ignore[arg-type]
    assert stream.waited is start and moved.arrived(lane)


def test_speeds_are_of_the_bytes_of_all_lanes_and_ratios_of_the_fastest_plain_way() -> None:
    times = {PLAIN: [2.0, 2.0], f"{PLAIN}, 4 MiB chunks": [1.0, 1.0], ONE: [1.25, 1.25]}
    found = {row.way: row for row in rows("both", 256 * MiB, times)}
    assert found[ONE].gigabytes_per_second == pytest.approx(2 * lane_copies.WINDOW / 1.25 / 1e9)
    assert found[ONE].of_plain.median == pytest.approx(0.8)
    assert found[PLAIN].of_plain.median == pytest.approx(0.5)


def sitting(*, both: float = 0.96, several: float = 0.985, speed: float = 55.0) -> list[Row]:
    def row(direction: str, size: int, way: str, of_plain: float, speed: float = speed) -> Row:
        return Row(direction, size, way, speed, Ratio(of_plain, of_plain, of_plain))

    return [
        row("d2h", 4 * MiB, PLAIN, 1.0, 52.0),
        row("d2h", 4 * MiB, ONE, 0.99, 52.0),
        row("d2h", 4 * MiB, SEVERAL, several, 52.0),
        row("d2h", 16 * MiB, ONE, 1.0),
        row("h2d", 16 * MiB, ONE, 0.99),
        row("both", 16 * MiB, ONE, both, 95.0),
    ]


def test_each_demand_is_decided_by_the_row_that_is_nearest_to_missing_it() -> None:
    judged = list(demands(sitting()))
    assert all(holds for holds, _ in judged)
    assert judged[0][1] == "d2h, ours, one piece: 0.990 of plain at 4.0 MiB, at least 0.98"
    assert judged[-1][1] == "d2h, 55.0 GB/s at 16.0 MiB, at least 55 from 16.0 MiB on"
    for missed in (sitting(both=0.94), sitting(several=0.97), sitting(speed=54.9)):
        assert [holds for holds, _ in demands(missed)].count(False) == 1


def test_the_table_has_a_line_for_each_row() -> None:
    lines = table(sitting()).splitlines()
    assert len(lines) == 6
    assert lines[2] == "d2h     4.0 MiB  ours, several pieces    52.0 GB/s  of plain: 0.985 (0.985 to 0.985)"


def test_a_sitting_prints_the_table_and_the_demands_and_keeps_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On host memory, and with times that are made up."""
    lanes, moved = open_device(CPU, Counters(), 0), memory()
    way = Ours(lanes, moved, ONE)

    def copied(way: Ours, direction: str, size: int) -> float:
        for lane in lane_copies.DIRECTIONS[direction]:
            way.copy(lane, 16 * MiB, size, way.begin()).synchronize()
        return lane_copies.WINDOW / 55e9

    monkeypatch.setattr(lane_copies, "SIZES", (4 * MiB, 16 * MiB))
    monkeypatch.setattr(lane_copies, "seconds", copied)
    ways = {direction: {PLAIN: way, ONE: way} for direction in lane_copies.DIRECTIONS}
    monkeypatch.setattr(lane_copies, "ways_on", lambda device: ways)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr("sys.argv", ["lane_copies", "--rounds", "3", "--json", str(tmp_path / "out.json")])
    with pytest.raises(SystemExit) as ended:
        lane_copies.main()
    printed = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0 and printed[0].startswith("SM clock")
    assert len(printed) == 1 + 3 * 2 * 2 + 4 and all(line.startswith("PASS") for line in printed[-4:])
    assert len(json.loads((tmp_path / "out.json").read_text())["rows"]) == 12
