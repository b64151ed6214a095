"""What a session counted over some steps."""

from __future__ import annotations

from typing import Any


def per_step(before: dict[str, Any], after: dict[str, Any], steps: int) -> dict[str, Any]:
    """From two of its stats what each of the steps between took.

    Returns
    -------
    dict
        ``moved``, bytes by lane; ``stalls``, seconds by cause; and of the allocator, if it is ours, ``pages``, see
        `paging.account`, of which ``dram`` is what lies there in the end; else ``flushes`` of its cache.
    """
    earlier = {cause: stall["seconds"] for cause, stall in before["stalls"].items()}
    stalls = {cause: stall["seconds"] - earlier.get(cause, 0.0) for cause, stall in after["stalls"].items()}
    found: dict[str, Any] = {
        "moved": {lane: (after["moved"][lane] - before["moved"][lane]) / steps for lane in after["moved"]},
        "stalls": {cause: seconds / steps for cause, seconds in stalls.items()},
    }
    if after["pages"] is None:
        found["flushes"] = (after["flushes"] - before["flushes"]) / steps
    else:
        earlier = before["pages"] or {}
        pages = {name: (count - earlier.get(name, 0)) / steps for name, count in after["pages"].items()}
        found["pages"] = pages | {"dram": after["pages"]["dram"]}
    return found
