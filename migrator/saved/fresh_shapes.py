"""Tells at which sites nearly every tensor has a shape that never came before: of what experts save of their tokens.

A recomputation that is tried for one shape is of no use for the next. A plan that counts on it is wrong: such tensors
are not dropped, and are offloaded though no plan foresees it.
"""

from __future__ import annotations

from collections import Counter

WINDOW = 32  # iterations that are judged together
NEARLY = 0.75  # of them


class FreshShapes:
    """Counts shapes that came for the first time, by site."""

    def __init__(self) -> None:
        self._iterations = 0
        self._came: Counter[str] = Counter()

    def came(self, key: str) -> None:
        """Count a shape that is new at a site."""
        self._came[key] += 1

    def iteration_over(self) -> set[str]:
        """Count an iteration; return the sites whose shapes are new nearly always."""
        self._iterations += 1
        if self._iterations < WINDOW:
            return set()
        found = {key for key, times in self._came.items() if times >= NEARLY * WINDOW}
        self._iterations = 0
        self._came.clear()
        return found
