"""Thins data to what a figure can show: a run may have more of it than a page has pixels. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Spans = Iterable[tuple[float, float]]


def extremes(values: NDArray[np.generic], buckets: int) -> NDArray[np.int64]:
    """Return the numbers of the values to draw: the lowest and the highest of each of so many buckets, in order.

    The first and the last are always among them. All are, if there are not many more.
    """
    count = len(values)
    if count <= 2 * buckets:
        return np.arange(count)
    edges = np.linspace(0, count, buckets + 1).astype(np.int64)
    begins = edges[:-1]
    picked = [begin + find(values[begin:end]) for begin, end in zip(begins, edges[1:], strict=True) for find in _FINDS]
    return np.unique(np.array([0, *picked, count - 1], dtype=np.int64))


_FINDS = (np.argmin, np.argmax)


def merged(spans: Spans, least: float) -> list[tuple[float, float]]:
    """Return spans (begin, end) in order, those that lie less than `least` apart as one, none shorter than `least`."""
    joined: list[list[float]] = []
    for begin, end in sorted(spans):
        end = max(end, begin + least)
        if joined and begin - joined[-1][1] < least:
            joined[-1][1] = max(end, joined[-1][1])
        else:
            joined.append([begin, end])
    return [(begin, end) for begin, end in joined]


def every(items: Sequence[object], most: int) -> range:
    """Return the numbers of at most `most` items, evenly spread."""
    return range(0, len(items), max(1, -(-len(items) // most)))


def shares(spans: Sequence[tuple[float, float]], longest: float, columns: int) -> NDArray[np.float64]:
    """Return which part of each of so many columns of a chart, `longest` wide, the spans take; they do not overlap."""
    if not spans:
        return np.zeros(columns)
    begins, ends = np.array(sorted(spans)).T
    at = np.stack((begins, ends), axis=1).ravel()
    taken = np.stack((np.cumsum(ends - begins) - (ends - begins), np.cumsum(ends - begins)), axis=1).ravel()
    until = np.interp(np.linspace(0, longest, columns + 1), at, taken)
    share: NDArray[np.float64] = np.clip(np.diff(until) * columns / longest, 0, 1).round(3)
    return share
