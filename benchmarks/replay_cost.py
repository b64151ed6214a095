"""What does replaying a block cost the host, beside running its module again and its operators' own dispatch?

``nice -n -5 python -m benchmarks.replay_cost``

A decoder's block and a T5 layer of the zoo, so small that the host's time is all there is. *Module again* is what a
checkpoint does: forward in Python, which builds a graph. *Dispatch* has TorchScript's interpreter, which is C++, call
the same operators without one. Times are those of the thread's own processor, the least of several rounds in turn.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.tape_cost import Operate, begin, seconds
from benchmarks.zoo import llama, t5
from torch_tiers.migrator.tape.recorder import Recorder


def blocks(device: str) -> dict[str, tuple[nn.Module, tuple[Tensor, ...]]]:
    """By name a block, and what it is given."""
    torch.manual_seed(0)
    with torch.device(device):
        x, angles, bias = torch.randn(1, 4, 32, requires_grad=True), torch.ones(4, 16), torch.zeros(1, 2, 4, 4)
        return {
            "llama block": (llama.Block(32, 2, 64), (x, angles, angles)),
            "t5 layer": (t5.Layer(32, 2, 64, False), (x, bias)),
        }


def measure(recorder: Recorder, module: nn.Module, given: tuple[Tensor, ...], count: int, rounds: int) -> list[float]:
    """Microseconds of a replay, of the module again and of dispatch, and how many operators a replay runs."""
    recorder.begin()
    packs = recorder.packs()
    out = module(*given)
    closure = packs.find(out, recorder.settings(), lambda storage: True)
    recorder.stop()
    if closure is None:
        raise SystemExit("there is no replay of what the block returns")
    with torch.no_grad():
        operators = make_fx(module)(*given)
        traced = torch.jit.trace(operators, given, check_trace=False)  # type: ignore[no-untyped-call]
    best = [float("inf")] * 3
    ways: tuple[tuple[Operate, bool], ...] = (
        (lambda: closure.make(()), False),
        (lambda: module(*given), True),
        (lambda: traced(*given), False),
    )
    for _ in range(rounds):
        for way, (run, builds_graph) in enumerate(ways):
            if given[0].is_cuda:
                torch.cuda.synchronize()  # a full queue of kernels would make the host wait
            # TorchScript would fuse operators.
            with torch.set_grad_enabled(builds_graph), torch.jit.optimized_execution(False):
                best[way] = min(best[way], seconds(run, count) * 1e6)
    return [*best, len(closure.names)]


def main() -> None:
    """Print a table."""
    recorder, options = begin(__doc__, count=20)
    print(f"torch {torch.__version__}; us a block, the least of {options.rounds} rounds")
    print(
        f"{'':14}{'replay':>9}{'module again':>14}{'dispatch':>10}{'of module':>11}{'of dispatch':>13}{'operators':>11}"
    )
    for name, (module, given) in blocks(options.device).items():
        replay, again, dispatch, operators = measure(recorder, module, given, options.count, options.rounds)
        ways = f"{replay:9.1f}{again:14.1f}{dispatch:10.1f}{replay / again:11.2f}{replay / dispatch:13.2f}"
        print(f"{name:14}{ways}{operators:11.0f}")


if __name__ == "__main__":
    main()
