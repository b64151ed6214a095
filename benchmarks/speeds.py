"""The speeds of the zoo's programs: what README claims of them, and what their report shows.

A claim is the median and the worst of all programs, not the best.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.zoo.results import OWN, PLAIN, SAVE_ON_CPU, GiB, read
from torch_tiers.planning.html import drawn
from torch_tiers.planning.html.axes import blank

FILE = Path(__file__).parent / "data/zoo.json"
CLAIMED = 60  # percent of what the plain program reserves
BANDS = (0.9, 0.8, 0.7)
Speed = dict[str, Any]
"""A program at a budget: `speed` of plain's, that of other ways `beside` it, and where and when that was."""
BESIDE = {OWN: "#cc6677", SAVE_ON_CPU: "#228833"}
"""What the programs are compared with, and its color; `memory` is a percentage of plain's."""


def load() -> list[Speed]:
    """All speeds, the fastest first."""
    found: list[Speed] = json.loads(FILE.read_text())
    return sorted(found, key=lambda one: -one["speed"])


def claims(speeds: Sequence[Speed]) -> list[list[str]]:
    """README's table: median and worst, then the programs by speed."""
    of = [one for one in speeds if one["budget"] == CLAIMED]
    worst = min(of, key=lambda one: one["speed"])
    table = [["of plain's speed", f"at {CLAIMED}% of the memory that plain reserves"]]
    table += [["**median**", f"**{median(one['speed'] for one in of):.3f}** of {len(of)} programs"]]
    table += [["**worst**", f"**{worst['speed']:.3f}** ({worst['program']})"]]
    for way in BESIDE:
        known = [(one["speed"], one["beside"][way]["speed"]) for one in of if way in one["beside"]]
        slower = sum(ours > theirs for ours, theirs in known)
        told = f"slower than torch-tiers for {slower} of the {len(known)} programs that have figures of it"
        shares = [one["beside"][way]["memory"] for one in of if "memory" in one["beside"].get(way, {})]
        told += f"; it takes {min(shares)} to {max(shares)}% of plain's memory" if shares else ""
        table += [[way, told]] if known else []
    above = float("inf")
    for bound in (*BANDS, 0.0):
        band = [one for one in of if bound <= one["speed"] < above]
        head = f"{bound} to {above}" if bound and above < 9 else f"{bound} or more" if bound else f"under {above}"
        if band:
            table.append([head, ", ".join(_claim(one) for one in band)])
        above = bound
    return table


def _claim(one: Speed) -> str:
    """A program in README, with its own checkpointing and the share of plain's memory that this takes."""
    beside = f" ({_beside(one, OWN)})" if OWN in one["beside"] else ""
    return f"{one['program']} {one['speed']:.3f}{beside}{'' if one['settled'] else ' not settled'}"


def picture(speeds: Sequence[Speed]) -> str:
    """README's figure, as SVG: a bar for each program, and a mark for each other way."""
    of = [one for one in speeds if one["budget"] == CLAIMED]
    with drawn.styled():
        figure = blank(1.2 + 0.14 * len(of))
        axes = figure.add_subplot()
        axes.barh(range(len(of)), [one["speed"] for one in of], color="#4477aa", label=f"torch-tiers at {CLAIMED}%")
        for way, color in BESIDE.items():
            places = [place for place, one in enumerate(of) if way in one["beside"]]
            found = [of[place]["beside"][way]["speed"] for place in places]
            if found:
                axes.plot(found, places, "|", color=color, markersize=9, markeredgewidth=2.5, label=way)
        axes.axvline(1, color="#888888", linewidth=0.8)
        axes.set_yticks(range(len(of)), [one["program"] for one in of])
        axes.invert_yaxis()
        axes.set(xlabel="of plain's speed", xlim=(0, 1.2))
        axes.legend(loc="lower right")
        return drawn.svg(figure)


def shown(speeds: Sequence[Speed]) -> list[list[str]]:
    """The report's table: all that is known, budget by budget."""
    table = [["program", "budget", "plain, ms", "GiB", "speed", *BESIDE, "card, day", ""]]
    for budget in sorted({one["budget"] for one in speeds}, reverse=True):
        of = [one for one in speeds if one["budget"] == budget]
        for one in of:
            row = [one["program"], f"{budget}%", _number(one.get("plain_ms")), _number(one.get("plain_gib"))]
            row += [f"{one['speed']:.3f}" + ("" if one["settled"] else " ~"), *(_beside(one, way) for way in BESIDE)]
            table.append([*row, f"{one['card']} {one['day']}", one.get("note", "")])
        middle = f"**{median(one['speed'] for one in of):.3f}** of {len(of)} programs"
        table.append([f"median at {budget}%", "", "", "", middle, *[""] * len(BESIDE), "", ""])
    return table


def _beside(one: Speed, way: str) -> str:
    """Another way's speed, and the share of plain's memory that it takes."""
    found = one["beside"].get(way)
    if found is None:
        return ""
    return f"{found['speed']:.3f}" + (f" at {found['memory']}%" if "memory" in found else "")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def take_over(results: Path) -> None:
    """Put what a run of the zoo measured in the place of older speeds of the same programs and budgets."""
    known = {(one["program"], one["budget"]): one for one in load()}
    beside = {one["program"]: one["beside"] for one in sorted(known.values(), key=lambda one: one["day"])}
    for program, record in read(results).items():
        plain = {} if record["error"] else record["rows"][PLAIN]
        if not plain or not plain["memory"] or "rows" not in record:
            continue
        for name, row in record["rows"].items():
            percent = name.removeprefix("tiers auto at ").removesuffix("%")
            if row["fraction"] is None or not percent.isdigit():
                continue
            speed: Speed = {
                "program": program,
                "budget": int(percent),
                "plain_ms": round(1e3 * plain["step"]["median"], 1),
            }
            speed |= {"plain_gib": round(plain["memory"] / GiB, 1), "speed": round(row["fraction"]["median"], 3)}
            speed["settled"] = row["settled"]
            others = {way: other for way in BESIDE if (other := record["rows"].get(way)) and other["fraction"]}
            speed["beside"] = {
                way: {
                    "speed": round(other["fraction"]["median"], 3),
                    "memory": round(100 * other["memory"] / plain["memory"]),
                }
                for way, other in others.items()
            } or beside.get(program, {})  # which no budget changes, and which need not be measured again
            card = record["device"].removeprefix("NVIDIA ").partition(" ")[0]
            known[program, int(percent)] = speed | {"card": card, "day": record["day"]}
    lines = ",\n".join(f" {json.dumps(one)}" for one in known.values())
    FILE.write_text(f"[\n{lines}\n]\n")
