"""Has process groups end only when their threads have released our hooks.

What gloo works on keeps the saved-tensor hooks of the thread that asked for it, and gloo's threads need the
interpreter to let go of them. Who ends a process group waits for these threads, and has the interpreter if the last
that held the group was, for instance, the reducer of DDP. With hooks of any kind PyTorch may hang there; with ours
every program might.
"""

from __future__ import annotations

import time
from functools import wraps
from typing import Any

import torch

PAUSE = 0.05  # seconds, in which the interpreter is free; the threads need microseconds

_plain: Any = None


def install() -> None:
    """Have `torch.distributed.destroy_process_group` leave them time."""
    global _plain
    if not torch.distributed.is_available():
        return
    _plain = plain = torch.distributed.destroy_process_group

    @wraps(plain)
    def destroy_process_group(*args: Any, **kwargs: Any) -> None:
        time.sleep(PAUSE)
        plain(*args, **kwargs)

    _put(destroy_process_group)


def uninstall() -> None:
    """Undo `install`. Whoever ends a group from now on gives the threads no time, so they have it here."""
    global _plain
    if _plain is not None:
        _put(_plain)
        _plain = None
        if torch.distributed.is_initialized():
            time.sleep(PAUSE)


def _put(function: Any) -> None:
    for module in (torch.distributed, torch.distributed.distributed_c10d):
        module.destroy_process_group = function  # type: ignore[attr-defined]
