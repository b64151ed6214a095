"""Where the console script begins: Ctrl-C ends it without a word also while it still imports."""

from __future__ import annotations


def main() -> int:
    """Run ``tiers`` and return its exit code."""
    try:
        from torch_tiers.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        return 130
