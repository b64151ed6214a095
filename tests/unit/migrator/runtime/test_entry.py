"""Where PyTorch calls us: once for each thing that happens, whoever was there before."""

from __future__ import annotations

from unittest import mock

from migrator.runtime import entry


def test_hooks_that_a_fork_has_left_behind_are_not_called_besides() -> None:
    """A child that opened a session of its own counted every step twice."""
    entry.install(mock.Mock())
    try:
        hooks = len(entry._handles)
        entry._after_fork()
        entry.install(mock.Mock())
        assert len(entry._handles) == hooks
    finally:
        entry.uninstall()
        entry._left_behind = False
