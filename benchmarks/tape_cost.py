"""What does recording an operator cost the host, where it is new and where it is known?

``nice -n -5 python -m benchmarks.tape_cost``

Times are those of the thread's own processor, the least of several rounds in turn: others on the machine add little.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from torch_tiers.migrator.tape.recorder import Recorder, load
from torch_tiers.places import cache_directory

Operate = Callable[[], object]


def operations() -> dict[str, Operate]:
    """Small enough that the host's time is all there is."""
    a, b, matrix, rows = torch.ones(4), torch.ones(4), torch.ones(4, 4), torch.ones(2, 4)
    leaf = torch.ones(4, requires_grad=True)
    return {
        "add": lambda: a + b,
        "add_": lambda: a.add_(b),
        "view": lambda: matrix.view(16),
        "addmm": lambda: torch.addmm(a, rows, matrix),
        "mul with grad": lambda: leaf * b,
        "rand": lambda: torch.rand(4),
        "cat of 8": lambda: torch.cat([a] * 8),
    }


def layer() -> Operate:
    """A block of a transformer, forward and backward."""
    block = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    x = torch.randn(2, 4, 16)

    def step() -> None:
        loss: Tensor = block(x).sum()
        loss.backward()

    return step


def seconds(operate: Operate, count: int) -> float:
    """Of the thread, for each."""
    began = time.thread_time()
    for _ in range(count):
        operate()
    return (time.thread_time() - began) / count


def paused(recorder: Recorder, operate: Operate, count: int) -> float:
    """The same where the key is on, and nothing is recorded."""
    with recorder.untracked():
        return seconds(operate, count)


def measure(recorder: Recorder, operate: Operate, count: int, rounds: int) -> dict[str, float]:
    """Microseconds an operator, by way, views among them; and how many operators."""
    best: dict[str, float] = {}
    with recorder.with_views():
        recorder.begin()
        operate()
        operators = len(recorder.listed() or [])
        recorder.stop()

    def note(way: str, value: float) -> None:
        best[way] = min(best.get(way, value), value)

    for _ in range(rounds):
        note("plain", seconds(operate, count))
        torch.ones(1)
        for way in ("new", "known"):
            if way == "new":  # what it compares with is another record
                recorder.begin()
                torch.ones(2).sin()
                recorder.stop()
            recorder.begin()
            note("paused", paused(recorder, operate, max(1, count // 4)))
            note(way, seconds(operate, count))
            recorder.stop()
    return {way: value / operators * 1e6 for way, value in best.items()} | {"operators": operators}


def begin(about: str | None, count: int) -> tuple[Recorder, argparse.Namespace]:
    """The recorder, and what the command line asks for; PyTorch has one thread from now on."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="cpu", help="of a replay; recording an operator costs the same on each")
    options = parser.parse_args()
    recorder = load(cache_directory())
    if isinstance(recorder, str):
        raise SystemExit(recorder)
    torch.set_num_threads(1)
    return recorder, options


def main() -> None:
    """Print a table."""
    recorder, options = begin(__doc__, count=1000)
    print(f"torch {torch.__version__}; us an operator, the least of {options.rounds} rounds")
    header = f"{'':16}{'plain':>8}{'paused':>8}{'new':>8}{'known':>8}{'more':>8}{'operators':>11}"
    print(header)
    rows: dict[str, Callable[[], dict[str, float]]] = {
        name: partial(measure, recorder, operate, options.count, options.rounds)
        for name, operate in operations().items()
    }
    rows["a layer's step"] = partial(measure, recorder, layer(), max(1, options.count // 20), options.rounds)
    for name, run in rows.items():
        found = run()
        more = found["known"] - found["plain"]
        ways = "".join(f"{found[way]:8.2f}" for way in ("plain", "paused", "new", "known"))
        print(f"{name:16}{ways}{more:8.2f}{found['operators']:11.0f}")


if __name__ == "__main__":
    main()
