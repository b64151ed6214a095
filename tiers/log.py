"""Where our log lines go."""

from __future__ import annotations

import logging

LEVELS = ("debug", "info", "warning", "error")


def set_up(level: str) -> None:
    """Let the logger ``tiers`` speak from `level` on, to stderr unless the program sets up logging itself."""
    log = logging.getLogger("tiers")
    log.setLevel(level.upper())
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("tiers: %(message)s"))
        # Asked at every line: programs set up logging after `import torch`, and no line may come twice.
        handler.addFilter(lambda _: not logging.getLogger().handlers)
        log.addHandler(handler)
