"""Records the runs beside this file anew: ``python -m tests.data.runs.record``, in the root of the repository.

``mlp`` is a run within 50 MiB, beside a program that holds host memory. Its step 40 waits for its data. ``mlp-plain``
is the same program without tiers. Guides and tests quote numbers of these runs; look them through afterwards.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn

HERE = Path(__file__).parent
STEPS = 60
ROWS, WIDTH, CLASSES, BLOCKS = 1024, 256, 16, 6
SLOW_STEP, LATE = 40, 0.5  # seconds that its data is late
HOST_MEMORY, OF_NEIGHBOUR = 96 << 20, 24 << 20
NEIGHBOUR = f"""
import sys
from pathlib import Path
from torch_tiers.allocator.host.ledger import Ledger
directory, sys.argv[0] = Path(sys.argv[1]), "preprocess.py"
account = Ledger(directory).open_account("dram", {HOST_MEMORY})
print(account.claim({OF_NEIGHBOUR}), flush=True)
sys.stdin.read()
"""


class Block(nn.Module):
    """A perceptron beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.act, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Add what the perceptron makes of `x`."""
        return x + self.down(self.act(self.up(self.norm(x))))


class Model(nn.Module):
    """The blocks, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, one row each."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train() -> None:
    """The program that is recorded."""
    platform.node = lambda: "a-machine"  # the timeline has its name
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(1, STEPS + 1):
        if step == SLOW_STEP:
            time.sleep(LATE)
        optimizer.zero_grad()
        model(torch.randn(ROWS, WIDTH)).square().mean().backward()
        optimizer.step()


def record() -> None:
    """Run it with tiers and without."""
    with tempfile.TemporaryDirectory() as ledger:
        command = [sys.executable, "-c", NEIGHBOUR, ledger]
        neighbour = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert neighbour.stdout is not None
        assert int(neighbour.stdout.readline()) == OF_NEIGHBOUR
        tiered = {"TIERS_ALLOCATOR": "torch", "TIERS_HBM": "50MiB", "TIERS_DRAM": str(HOST_MEMORY)}
        for name, variables in (("mlp", tiered), ("mlp-plain", {"TIERS_ALLOCATOR": "off"})):
            shutil.rmtree(HERE / name, ignore_errors=True)
            own = {"TIERS_RUN": str(HERE / name), "TIERS_PLAN_CACHE": "0", "TIERS_LEDGER": ledger}
            command = [sys.executable, "-m", __spec__.name, "train"]
            subprocess.run(command, env=os.environ | own | variables, check=True)
        neighbour.communicate()


if __name__ == "__main__":
    train() if sys.argv[1:] == ["train"] else record()
