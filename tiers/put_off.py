"""What came before the session was whole, and waits for it.

`import torch` calls our entry point. Where it is `torch_tiers.session` that imports torch, that is too early.
"""

from __future__ import annotations

from collections.abc import Callable

_waiting: list[Callable[[], None]] = []


def until_the_session_is_whole(call: Callable[[], None]) -> None:
    """Register a call for when the session is whole. One that is registered twice is made once."""
    if call not in _waiting:
        _waiting.append(call)


def session_is_whole() -> None:
    """Make the registered calls."""
    while _waiting:
        _waiting.pop()()
