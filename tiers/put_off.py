"""What came before the session was whole, and waits for it.

`import torch` calls our entry point. Where it is `torch_tiers.session` that imports torch, that is too early.
"""

from __future__ import annotations

from collections.abc import Callable

_waiting: list[Callable[[], None]] = []


def until_the_session_is_whole(call: Callable[[], None]) -> None:
    """Call this once it is; several times, as often as this was called, is once."""
    if call not in _waiting:
        _waiting.append(call)


def session_is_whole() -> None:
    """Catch up."""
    while _waiting:
        _waiting.pop()()
