"""Copies between a GPU and pinned memory of several makes, in turn: does the make matter, or who wrote the memory last?

``python -m benchmarks.pinned_copies --rounds 15``

Makes: what PyTorch pins (cudaHostAlloc), and anonymous mappings pinned by cudaHostRegister: of pages of 4 KiB, of
huge pages as the arena's are, and of huge pages not touched, or populated by the kernel, before they are pinned.
Copies to the GPU start from memory that a core wrote last, so that its caches may hold it, or that the GPU wrote
last, as in a run. They are queued behind a kernel and timed by events. Prints GB/s: the median of the rounds, and
the median ratio of speeds to cudaHostAlloc with its 95% bootstrap interval.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.alternate import median_ratio, self_timed, sm_clock
from torch_tiers.allocator.host.pinning import Pages, map_pages, pin, touch
from torch_tiers.allocator.sizes import MiB, format_size

SIZES = (4 * MiB, 16 * MiB, 64 * MiB, 256 * MiB)
WINDOW = 64 * MiB  # bytes that are queued together
HOLD = 8_000_000  # cycles: 4 ms or more
BASE = "cudaHostAlloc"
MADV_NOHUGEPAGE, MADV_POPULATE_WRITE = 15, 23
STATES = ("h2d, a core wrote", "h2d, the GPU wrote", "d2h")


def advise(pages: Pages, advice: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    address, nbytes = ctypes.c_void_p(ctypes.addressof(pages)), ctypes.c_size_t(ctypes.sizeof(pages))
    if libc.madvise(address, nbytes, advice):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def small_pages(nbytes: int) -> Pages:
    pages = map_pages(nbytes)
    advise(pages, MADV_NOHUGEPAGE)
    touch(pages)
    return pages


def huge_pages(nbytes: int) -> Pages:
    pages = map_pages(nbytes)
    touch(pages)
    return pages


def populated(nbytes: int) -> Pages:
    pages = map_pages(nbytes)
    advise(pages, MADV_POPULATE_WRITE)
    return pages


MAKES: dict[str, Callable[[int], Pages]] = {
    "registered, 4 KiB pages": small_pages,
    "registered, huge pages": huge_pages,
    "registered, not touched": map_pages,
    "registered, populated": populated,
}


def huge_share(address: int) -> float:
    """The part of the mapping at `address` that lies on huge pages, by the kernel's account."""
    mapping, fields = False, {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            if mapping:
                break
            mapping = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif mapping and line.endswith(" kB"):
            name, value = line.removesuffix(" kB").split(":")
            fields[name] = int(value)
    return fields.get("AnonHugePages", 0) / max(fields.get("Rss", 0), 1)


@dataclass(frozen=True)
class Copier:
    """Copies between `host` and `device`, both of `WINDOW` bytes or of one copy, if that is more."""

    host: torch.Tensor
    device: torch.Tensor
    stream: torch.cuda.Stream

    def seconds(self, state: str, size: int) -> float:
        host, device = self.host[: max(size, WINDOW)], self.device[: max(size, WINDOW)]
        if state == STATES[0]:
            host.numpy()[:] = 1
        else:
            host.copy_(device)
        torch.cuda.synchronize()
        pairs = zip(host.split(size), device.split(size), strict=True)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(HOLD)
            start.record()
            for one, other in pairs:
                if state == "d2h":
                    one.copy_(other, non_blocking=True)
                else:
                    other.copy_(one, non_blocking=True)
            end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no GPU that torch can use: nothing to copy to")
    largest = max(SIZES)
    device, stream = torch.empty(largest, dtype=torch.uint8, device="cuda"), torch.cuda.Stream()
    hosts = {BASE: torch.empty(largest, dtype=torch.uint8, pin_memory=True)}
    for name, make in MAKES.items():
        pages = make(largest)
        pin(pages, torch.cuda.current_device())
        hosts[name] = torch.frombuffer(pages, dtype=torch.uint8)
    for name, host in hosts.items():
        print(f"{name:26}{huge_share(host.data_ptr()):6.0%} on huge pages")
    copiers = {name: Copier(host, device, stream) for name, host in hosts.items()}
    print(f"SM clock {sm_clock()} MHz")
    for state, size in itertools.product(STATES, SIZES):
        times = self_timed(
            {name: partial(copier.seconds, state, size) for name, copier in copiers.items()}, options.rounds
        )
        for name in copiers:
            speed = max(size, WINDOW) / float(np.median(times[name])) / 1e9
            ratio = median_ratio(times[BASE], times[name])
            print(
                f"{state:20}{format_size(size):>10}  {name:26}{speed:6.1f} GB/s"
                f"  of {BASE}: {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
            )
    print(f"SM clock {sm_clock()} MHz")


if __name__ == "__main__":
    main()
