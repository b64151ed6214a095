"""Which cores belong to which NUMA node, and running on them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch_tiers.topology.memory import numa_nodes


@dataclass(frozen=True, slots=True)
class Node:
    """A NUMA node and those of its cores that this process may run on."""

    number: int
    cores: frozenset[int]


def nodes(root: Path = Path("/")) -> tuple[Node, ...]:
    """List the nodes with memory; one node with every allowed core where the kernel names none."""
    allowed = os.sched_getaffinity(0)
    found = tuple(Node(node.number, node.cores & allowed) for node in numa_nodes(root))
    return found or (Node(0, frozenset(allowed)),)


@contextmanager
def on_cores(cores: frozenset[int]) -> Iterator[None]:
    """Run this thread, and every thread and process that it starts inside, on `cores`."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
