"""Validates fields of the files that a run writes (`trace.json`, `plan.json`) while they are read.

The files may be truncated, of another version, or malicious. Pure functions on plain data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

MOST_BYTES = 1 << 44
"""Bytes of one storage, at most: sums of as many as an iteration has still are 64-bit numbers."""

MOST_SECONDS = 1e9
"""Seconds that anything takes, at most: thirty years."""

_SHOWN = 40  # characters of what was found

Item = TypeVar("Item")


class BadField(ValueError):
    """A file of a run says what no run writes.

    Parameters
    ----------
    where : str
        The field, such as ``sites[3].nbytes``.
    what : str
        What is wrong with it.
    """

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{where} {what}")
        self.where = where


def parse(text: str) -> Any:
    """Read JSON; numbers are finite, and nothing is nested so deeply that reading it fails.

    Raises
    ------
    ValueError
        If it is none.
    """
    try:
        return json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply to be what a run has written") from None


def record(value: object, where: str) -> Mapping[str, Any]:
    """Return a JSON object; refuse anything else."""
    return value if isinstance(value, dict) else _refuse(where, "an object", value)


def field(of: Mapping[str, Any], name: str, where: str = "") -> Any:
    """Return the value of a name of an object; refuse an object without it."""
    if name not in of:
        raise BadField(f"{where}.{name}" if where else name, "is missing")
    return of[name]


def no_others(of: Mapping[str, Any], names: tuple[str, ...], where: str) -> None:
    """Refuse an object that has other names."""
    for name in of:
        if name not in names:
            raise BadField(where, f"has an unknown field {_short(name)}")


def text(value: object, where: str) -> str:
    """Return a string of characters that can be printed; refuse anything else."""
    if not isinstance(value, str):
        _refuse(where, "a string", value)
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        raise BadField(where, "holds what is no character") from None
    return value


def whole(value: object, where: str, low: int = 0, high: int = MOST_BYTES) -> int:
    """Return a whole number from `low` to `high`, both included; refuse anything else."""
    if type(value) is not int or not low <= value <= high:  # True is one of Python's, too
        _refuse(where, f"a whole number from {low} to {high}", value)
    return value


def finite(value: object, where: str, low: float = 0.0, high: float = MOST_SECONDS) -> float:
    """Return a finite number from `low` to `high`, both included; refuse anything else."""
    if type(value) not in (int, float) or not low <= value <= high:  # type: ignore[operator]
        _refuse(where, f"a number from {low:g} to {high:g}", value)
    return float(value)  # type: ignore[arg-type]


def items(value: object, where: str, read: Callable[[Any, str], Item], most: int) -> tuple[Item, ...]:
    """Return a list of at most `most` items, each as `read` returns it."""
    if not isinstance(value, list):
        _refuse(where, "a list", value)
    if len(value) > most:
        raise BadField(where, f"has {len(value)} items, and no more than {most} can be")
    return tuple(read(item, f"{where}[{number}]") for number, item in enumerate(value))


def mapping(value: object, where: str, read: Callable[[Any, str], Item], most: int) -> dict[str, Item]:
    """Return an object with any names, at most `most`, with values as `read` returns them."""
    named = record(value, where)
    if len(named) > most:
        raise BadField(where, f"has {len(named)} entries, and no more than {most} can be")
    return {text(name, where): read(item, f"{where}[{_short(name)}]") for name, item in named.items()}


def number_of(name: str, where: str) -> int:
    """Return the whole number that a name of an entry stands for: JSON has no other names than strings."""
    digits = name.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 19):
        raise BadField(where, f"has an entry {_short(name)}, which is no number of a storage")
    return int(name)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number that can be reckoned with")


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _no_number(digits[:_SHOWN])


def _refuse(where: str, wanted: str, found: object) -> NoReturn:
    raise BadField(where, f"is {_short(found)} and not {wanted}")


def _short(found: object) -> str:
    if isinstance(found, dict | list):  # which may be long
        return "an object" if isinstance(found, dict) else "a list"
    if isinstance(found, int) and abs(found) > 1 << 100:
        return "a number of many digits"
    shown = repr(found[: _SHOWN + 1] if isinstance(found, str) else found)
    return shown if len(shown) <= _SHOWN + 2 else f"{shown[:_SHOWN]}..."
