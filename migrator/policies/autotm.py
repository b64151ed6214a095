"""AutoTM (Hildebrand et al., ASPLOS'20): placement and movement of tensors as an integer program.

Each tensor has a flow from its creation to its use: it stays, or leaves over one edge and comes back over
another. An edge is synchronous, and the step waits for it, or asynchronous beside one node. With binary edges::

    minimise    sum over nodes of max(node time, transfers beside it)  +  synchronous transfers
    subject to  out = back for each tensor, and back not before out
                bytes in HBM at each node <= what the budget leaves at it

Nodes are kernels in the paper. Here they are about `NODES` spans of equal time, cut where backward begins, and
tensors that are created and used at the same two nodes are one variable: the program stays small for any trace.
An asynchronous edge lies within `REACH` nodes of the tensor's own. Which kernel runs is not for a plan to choose.
The paper lowers the limit and solves again where memory was fragmented: our allocator's layouts need no such margin.
Where no choice fits, the excess is charged so dearly that it is as small as can be; the remainder then goes in the
order of creation. The runtime starts every move as soon as it can, so of the way out only the choice is kept.

Solved by HiGHS through scipy, the extra ``plan``; the solver keeps to a time limit and returns its best so far.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torch_tiers.migrator.model.links import Links
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.planner.draft import Draft
from torch_tiers.migrator.planner.intervals import Interval

NODES = 40
REACH = 10  # nodes
SECONDS = 1.0  # for the solver
GAP = 0.01  # of the optimum: closer than this it need not get
EXCESS = 100  # times the way out and back: what each byte above the budget costs


@dataclass(frozen=True, slots=True)
class _Bundle:
    """Tensors created at node `begin` and used at node `end`."""

    begin: int
    end: int
    members: tuple[Interval, ...]

    @property
    def nbytes(self) -> int:
        return sum(idle.nbytes for idle in self.members)


def plan(trace: Trace, budget: int, links: Links, *, seconds: float = SECONDS) -> Plan:
    """Solve the program, for `seconds` at most.

    Raises
    ------
    ModuleNotFoundError
        If scipy is not installed.
    """
    draft = Draft(trace, budget, links)
    if not draft.memory.fits:
        nodes = _nodes(draft)
        bundles = _bundles(draft, nodes)
        for bundle, back in _solve(draft, nodes, bundles, seconds):
            for idle in bundle.members:
                # An asynchronous way back begins with its node, a synchronous one with the use.
                draft.offload(idle, idle.begin + 2, idle.end + 1 if back == bundle.end else nodes[back])
        draft.offload_until_it_fits(draft.stays)
    return draft.plan("autotm")


def _nodes(draft: Draft) -> list[int]:
    """The first stretch of each node."""
    times = draft.trace.times
    turn = min((idle.end for idle in draft.idle.values()), default=0)
    marks = [max(draft.trace.seconds, times[-1]) * k / NODES for k in range(1, NODES)]
    return sorted({0, turn + 1, *(bisect_right(times, mark) for mark in marks)})


def _bundles(draft: Draft, nodes: Sequence[int]) -> list[_Bundle]:
    members: dict[tuple[int, int], list[Interval]] = {}
    for idle in draft.idle.values():
        begin, end = (bisect_right(nodes, stretch) - 1 for stretch in (idle.begin, idle.end + 1))
        if begin + 1 < end:
            members.setdefault((begin, end), []).append(idle)
    return [_Bundle(begin, end, tuple(idles)) for (begin, end), idles in members.items()]


class _Program:
    """Rows and columns of a mixed integer program, as scipy takes it."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.whole: list[int] = []
        self.lower: list[float] = []
        self.upper: list[float] = []
        self._entries: list[tuple[int, int, float]] = []

    def variable(self, cost: float, *, whole: bool) -> int:
        self.cost.append(cost)
        self.whole.append(int(whole))
        return len(self.cost) - 1

    def row(self, terms: Sequence[tuple[int, float]], lower: float = -np.inf, upper: float = np.inf) -> None:
        """Have the sum of the terms between `lower` and `upper`."""
        self._entries.extend((len(self.lower), column, factor) for column, factor in terms)
        self.lower.append(lower)
        self.upper.append(upper)

    def solve(self, seconds: float) -> Sequence[float] | None:
        """The best values found within `seconds`; None if there was none."""
        try:
            from scipy import optimize, sparse
        except ModuleNotFoundError:
            raise ModuleNotFoundError("the policy autotm needs scipy: pip install scipy") from None
        rows, columns, factors = zip(*self._entries, strict=True)
        matrix = sparse.csr_array((factors, (rows, columns)), shape=(len(self.lower), len(self.cost)))
        result: Any = optimize.milp(
            self.cost,
            integrality=self.whole,
            bounds=optimize.Bounds(0, np.where(self.whole, 1, np.inf)),
            constraints=optimize.LinearConstraint(matrix, self.lower, self.upper),
            options={"time_limit": seconds, "mip_rel_gap": GAP},
        )
        values: Sequence[float] | None = result.x
        return values


def _solve(draft: Draft, nodes: Sequence[int], bundles: Sequence[_Bundle], seconds: float) -> list[tuple[_Bundle, int]]:
    """The bundles that move, and the node beside which each comes back; its own if synchronously."""
    if not bundles:
        return []
    links, program = draft.lanes.links, _Program()
    total = len(nodes)
    beside: dict[str, list[list[tuple[int, float]]]] = {lane: [[] for _ in nodes] for lane in ("d2h", "h2d", "both")}
    away: list[list[tuple[int, float]]] = [[] for _ in nodes]  # bytes that are not in HBM at each node, in GB
    chosen: list[tuple[_Bundle, dict[int, int]]] = []
    for bundle in bundles:
        size = bundle.nbytes / 1e9

        def edge(lane: str, node: int, own: int, size: float = size) -> int:
            rate = getattr(links, lane) / 1e9
            column = program.variable(size / rate if node == own else 0.0, whole=True)
            if node != own:
                beside[lane][node].append((column, size / rate))
                beside["both"][node].append((column, size / (links.both / 1e9)))
            return column

        first, last = bundle.begin, bundle.end
        out = {node: edge("d2h", node, first) for node in range(first, min(first + REACH, last - 1))}
        back = {node: edge("h2d", node, last) for node in range(max(last - REACH + 1, first + 2), last + 1)}
        program.row([(k, 1) for k in out.values()] + [(k, -1) for k in back.values()], 0, 0)
        program.row([(k, 1) for k in out.values()], upper=1)
        for node in range(first + 1, last):
            gone = [(k, 1.0) for at, k in out.items() if at < node] + [
                (k, -1.0) for at, k in back.items() if at <= node
            ]
            if min(back) <= node <= max(out):
                program.row(gone, lower=0)
            away[node].extend((k, factor * size) for k, factor in gone)
        chosen.append((bundle, back))
    over = draft.memory.used - draft.memory.room
    for node, first in enumerate(nodes):
        end = nodes[node + 1] if node + 1 < total else len(over)
        waits = program.variable(1.0, whole=False)  # how much longer the node takes than it computes
        computes = float(draft.durations[first:end].sum())
        for terms in (lane[node] for lane in beside.values()):
            if terms:
                program.row([(waits, 1.0), *((k, -seconds) for k, seconds in terms)], lower=-computes)
        lacking = float(over[first:end].max()) / 1e9
        if lacking > 0:
            excess = program.variable(EXCESS * 1e9 * (1 / links.d2h + 1 / links.h2d), whole=False)
            program.row([(excess, 1.0), *away[node]], lower=lacking)
    values = program.solve(seconds)
    if values is None:
        return []
    return [(bundle, node) for bundle, back in chosen for node, k in back.items() if values[k] > 0.5]
