"""Where our log lines go."""

from __future__ import annotations

import logging

from torch_tiers.printable import printable

LEVELS = ("debug", "info", "warning", "error")


class _Formatter(logging.Formatter):
    """Makes every message a line that controls no terminal; a traceback below it stays as it is."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))


def set_up(level: str) -> None:
    """Let the logger ``tiers`` speak from `level` on, to stderr unless the program sets up logging itself."""
    log = logging.getLogger("tiers")
    log.setLevel(level.upper())
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(_Formatter("tiers: %(message)s"))
        # Asked at every line: programs set up logging after `import torch`, and no line may come twice.
        handler.addFilter(lambda _: not logging.getLogger().handlers)
        log.addHandler(handler)
