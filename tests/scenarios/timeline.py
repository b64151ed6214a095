"""The timeline of a run is true: what it shows happened when it says, by the program's own clock."""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from unittest import mock

import torch

from tests.scenarios import main, moving, perceptron, train
from torch_tiers.migrator.streams import cuda as lanes_of_gpu

OFF = 2e-3  # seconds by which a device's events may be misplaced


def copies_and_iterations_lie_within_the_steps_that_they_belong_to(device: torch.device) -> None:
    steps: list[tuple[float, float]] = []
    # Else one copy in 64 MiB tells its time, which programs of this size take tens of steps to move.
    with tempfile.TemporaryDirectory() as run, mock.patch.object(lanes_of_gpu, "TIMED_EVERY", 0):
        with moving(room=0, run=run) as session:
            model = perceptron(device, depth=8)
            for _ in range(12):
                begin = time.perf_counter()
                train(model, device, steps=1)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                steps.append((begin, time.perf_counter()))
            moved = session.stats()["moved"]
        whole = json.loads(gzip.decompress((Path(run) / "timeline.json.gz").read_bytes()))
    slices = [event for event in whole["traceEvents"] if event["ph"] == "X"]
    for lane in ("d2h", "h2d"):
        copies = [event for event in slices if event["cat"] == lane]
        spans = sorted((event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6) for event in copies)
        print(f"  {len(spans)} copies on {lane}")
        assert len(spans) > 10
        assert sum(event["args"]["bytes"] for event in copies) <= moved[lane]
        assert all(first[1] <= second[0] + 1e-4 for first, second in pairwise(spans))
        late = [span for span in spans if span[0] > steps[1][0]]  # the first are placed before the clocks are tied
        for span in late:
            assert any(begin - OFF <= span[0] and span[1] <= end + OFF for begin, end in steps), (span, steps)
    ends = [(event["ts"] + event["dur"]) / 1e6 for event in slices if event["cat"] == "iterations"]
    assert len(ends) == len(steps) - 1
    for end, (begin, over) in zip(ends, steps[1:], strict=True):
        assert begin - OFF <= end <= over + OFF, (end, begin, over)


if __name__ == "__main__":
    main("timeline")
