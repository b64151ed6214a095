"""Peak memory of single iterations, from PyTorch's peak counters, without the program noticing.

PyTorch has one peak per statistic since the last reset, and the program may be reading it. `restart`
resets it and remembers what it was; while it is remembered, PyTorch's own functions report the larger
of the two, until the program itself resets.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.cuda import memory

_before: dict[int, dict[str, Any]] = {}
_unread: dict[int, list[dict[str, Any]]] = {}  # what there was at restarts, which `_before` does not have yet
MOST_UNREAD = 16  # each is some KiB
_remembering = threading.RLock()  # a signal's handler may ask for peaks, in the middle of any of this
_plain_stats = memory.memory_stats_as_nested_dict
_plain_reset = memory.reset_peak_memory_stats


class PeaksOfPyTorch:
    """Those of one device; `migrator.streams.Peaks`."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._index = device, _index(device)
        self._highest = 0  # peak taken since the last restart

    def restart(self) -> tuple[int, int]:
        """Begin a new peak; the most bytes allocated since the last restart, and what `retries` tells.

        Steps begin with this, while the device has nothing to do: what has been is looked through later, all at once.
        """
        with _remembering:
            now = _plain_stats(self._device)
            unread = _unread.setdefault(self._index, [])
            unread.append(now)
            if len(unread) == MOST_UNREAD:
                _read(self._index)
            peak, self._highest = max(_peak(now), self._highest), 0
            _plain_reset(self._device)
        return peak, int(now["num_alloc_retries"])

    def take_peak(self, *, with_present: bool = False) -> int:
        """The most bytes allocated since the last call, or restart; a restart alone forgets it.

        PyTorch's peaks begin anew with what is allocated, whether or not it is asked for `with_present`.
        """
        with _remembering:
            now = _plain_stats(self._device)
            _read(self._index)
            _keep_peaks(_before.setdefault(self._index, {}), now)
            peak = _peak(now)
            self._highest = max(peak, self._highest)
            _plain_reset(self._device)
        return peak

    def delayed(self) -> float:
        """Nothing: PyTorch does not count that."""
        return 0.0

    def retries(self) -> int:
        """How often PyTorch's allocator has flushed its cache because a request exceeded the budget."""
        return int(_plain_stats(self._device)["num_alloc_retries"])


def _peak(stats: dict[str, Any]) -> int:
    return int(stats["allocated_bytes"]["all"]["peak"])


def install() -> None:
    """Have PyTorch's functions take remembered peaks into account."""
    memory.memory_stats_as_nested_dict = _stats
    memory.reset_peak_memory_stats = torch.cuda.reset_peak_memory_stats = _reset


def uninstall() -> None:
    """Put PyTorch's functions back; peaks before the last restart are forgotten."""
    memory.memory_stats_as_nested_dict = _plain_stats
    memory.reset_peak_memory_stats = torch.cuda.reset_peak_memory_stats = _plain_reset
    _before.clear()
    _unread.clear()


def _stats(device: Any = None) -> dict[str, Any]:
    now, index = _plain_stats(device), _index(device)
    _read(index)
    before = _before.get(index)
    return now if before is None else _larger_peaks(now, before)


def _reset(device: Any = None) -> None:
    with _remembering:
        _before.pop(index := _index(device), None)
        _unread.pop(index, None)
        _plain_reset(device)


def _read(index: int) -> None:
    """Look through what there was at restarts."""
    with _remembering:
        for then in _unread.get(index, ()):
            _keep_peaks(_before.setdefault(index, {}), then)
        _unread.pop(index, None)


def _keep_peaks(before: dict[str, Any], now: dict[str, Any]) -> None:
    for name, value in now.items():
        if isinstance(value, dict):
            _keep_peaks(before.setdefault(name, {}), value)
        elif name == "peak" and value > before.get(name, 0):
            before[name] = value


def _larger_peaks(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    merged = {}
    for name, value in now.items():
        if isinstance(value, dict):
            merged[name] = _larger_peaks(value, before.get(name, {}))
        else:
            merged[name] = max(value, before.get(name, 0)) if name == "peak" else value
    return merged


def _index(device: Any) -> int:
    index: int = torch.cuda._utils._get_device_index(device, optional=True)
    return index
