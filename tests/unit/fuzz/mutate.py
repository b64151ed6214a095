"""Makes hostile inputs of good ones: seeded, so that each can be made again."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from random import Random
from typing import Any

NUMBERS = (0, 1, -1, 2, 0.5, -0.0, 1e-308, 1e308, 4095, 4096, 1 << 31, 1 << 44, 1 << 63, -(1 << 63), 1 << 200, 1e9)
TEXTS = ("", "x", "\x00", "\x1b[31m", "\u202e", "\ud800", "é" * 300, "a\nb", "-1", "1", "NaN", "../..", "[/red]", "{}")
ODD: tuple[Any, ...] = (None, True, False, [], {}, [[]], {"": None}, [None] * 9, float("nan"), float("inf"))
WORDS = (
    *("1GiB", "0", "-1", "1e400", "nan", "inf", "99999999999999999999TiB", "1.5.5GiB", "GiB", "0x10", "1_000", "+5"),
    *("auto", "off", "true", "50%", "101%", "1,2", "a:b", "/dev/null", "/proc/self", "/", ".", "~", "~nosuchuser"),
    *("[", "]", "{}", "=", "==", "[[", "]]", '"""', "'''", "#", "\\", "\\u0000", "1979-05-27T07:32:00Z", "\n"),
    *("hbm.capacity", "capacity", "\u0661\u0662"),
)

Path = tuple[Any, ...]


def value(rng: Random) -> Any:
    """Something that has no business where it is put."""
    return copy.deepcopy(rng.choice(rng.choice((NUMBERS, TEXTS, ODD))))


def mutated(data: Any, rng: Random) -> Any:
    """JSON with one thing other than it was, or a few."""
    data = copy.deepcopy(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        paths = [*_paths(data, ())]
        if not paths:
            return value(rng)
        path = rng.choice(paths)
        holder = data
        for step in path[:-1]:
            holder = holder[step]
        _change(holder, path[-1], rng)
    return data


def nearly(data: Any, rng: Random) -> Any:
    """The same with numbers a little off: much of that is what a run could have written."""
    data = copy.deepcopy(data)
    for _ in range(rng.choice((1, 1, 1, 2, 6))):
        numbers = [path for path in _paths(data, ()) if _is_number(_at(data, path))]
        if numbers:
            path = rng.choice(numbers)
            old = _at(data, path)
            _at(data, path[:-1])[path[-1]] = rng.choice((0, old * 2, old // 2, old + 1, old - 1, old * 1000, -old))
    return data


def written(data: Any, rng: Random) -> bytes:
    """As a file, which now and then is cut off, or has other bytes in it."""
    content = json.dumps(data).encode()
    return garbled(content, rng) if rng.random() < 0.1 else content


def garbled(content: bytes, rng: Random) -> bytes:
    """Bytes with some of them lost, doubled, or other ones."""
    some = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        begin = rng.randrange(len(some) + 1)
        end = min(len(some), begin + rng.choice((0, 1, 1, 8, 64)))
        some[begin:end] = rng.choice((b"", rng.randbytes(3), some[begin:end] * 2, b"[" * 2000, b"9" * 5000, b"\x00"))
    return bytes(some)


def text(good: str, rng: Random) -> str:
    """A text such as tiers.toml, with words of it lost, doubled, exchanged, or hostile ones in their place."""
    lines = good.splitlines(keepends=True)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(lines))
        line = lines[at]
        key, equals, _ = line.partition("=")
        lines[at] = rng.choice(
            (
                "",
                line * 2,
                line[: rng.randrange(len(line) + 1)],
                f"{key}{equals}{rng.choice(WORDS)}\n",
                f"{key}{equals}{json.dumps(value(rng))}\n",
                f"{key}{equals}{json.dumps(rng.choice(WORDS))}\n",
                rng.choice(lines),
                f"{rng.choice(WORDS)} = {rng.choice(WORDS)}\n",
                f"{key}{equals}{rng.choice(('[', '{a=')) * rng.choice((1, 40, 3000))}\n",
            )
        )
    return "".join(lines)


def word(good: str, rng: Random) -> str:
    """What somebody may have put into a variable; such texts hold no zero byte."""
    at = rng.randrange(len(good) + 1)
    new = rng.choice(
        (rng.choice(WORDS), str(value(rng)), good[:at], good[:at] + rng.choice(WORDS) + good[at:], good * 99)
    )
    return new.replace("\x00", "")


def _paths(data: Any, above: Path) -> Iterator[Path]:
    entries = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for name, below in entries:
        yield (*above, name)
        yield from _paths(below, (*above, name))


def _at(data: Any, path: Path) -> Any:
    for step in path:
        data = data[step]
    return data


def _is_number(found: object) -> bool:
    return isinstance(found, int | float) and not isinstance(found, bool)


def _change(holder: Any, name: Any, rng: Random) -> None:
    kind = rng.randrange(5)
    if kind == 0:
        del holder[name]
    elif kind == 1 and isinstance(holder, list):
        holder.insert(name, copy.deepcopy(rng.choice(holder)))
    elif kind == 1:
        holder[rng.choice(TEXTS)] = holder[name]
    elif kind == 2:
        others = [*holder] if isinstance(holder, dict) else [*range(len(holder))]
        other = rng.choice(others)
        holder[name], holder[other] = holder[other], holder[name]
    else:
        holder[name] = value(rng)
