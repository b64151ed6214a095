from __future__ import annotations

import subprocess
import sys

PROGRAM = """
from torch_tiers.allocator.at_exit import close_at_exit
class Resource:
    def __init__(self, name): self.name = name; close_at_exit(self)
    def close(self): print(self.name, flush=True); raise OSError(f"{self.name} is stuck")
kept = [Resource("arena"), Resource("store")]
"""


def test_what_cannot_be_closed_keeps_nothing_else_from_it() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == ["arena", "store"]
    assert "arena is stuck" in done.stderr and "store is stuck" in done.stderr
