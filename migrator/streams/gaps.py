"""Takes what is not the program's out of the times of an iteration."""

from __future__ import annotations


def without_gaps(gaps: list[tuple[float, float]], times: list[float]) -> list[float]:
    """`times` on a clock that stands still in the gaps, all in seconds.

    Gaps are pairs of begin and end, may overlap, and come in any order.
    """
    apart: list[tuple[float, float]] = []
    for start, end in sorted(gaps):
        start = max(start, apart[-1][1]) if apart else start
        if end > start:
            apart.append((start, end))
    shifted, lost, k = {}, 0.0, 0
    for at in sorted(times):
        while k < len(apart) and apart[k][1] <= at:
            lost += apart[k][1] - apart[k][0]
            k += 1
        shifted[at] = at - lost - (max(0.0, at - apart[k][0]) if k < len(apart) else 0.0)
    return [shifted[at] for at in times]
