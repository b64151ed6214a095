"""How does the kernel count host memory of every kind that we make, and which limits does it obey?

``python -m benchmarks.host_memory_accounting`` takes about a minute and a half with a GPU; kinds that need one are
left out without.

Each kind in processes of its own. First 1 GiB of it: what that adds to the process (resident, locked, pinned), to its
cgroup, and takes from the machine. Then the same under ``ulimit -l 64`` (KiB) without the right to go beyond
(CAP_IPC_LOCK is dropped). Then 6 GiB under a cgroup limit of 4 GiB, where a cgroup can be made. Locked memory (mlock)
is the control: what does not stop it proves nothing about the others.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.unit.limited import Cgroup, cgroup_refusal
from torch_tiers.allocator.errors import TiersError
from torch_tiers.allocator.host.pinning import Pages, map_pages, pin, touch
from torch_tiers.allocator.native import Core
from torch_tiers.allocator.sizes import PAGE, GiB, KiB, format_size
from torch_tiers.topology.memory import hierarchies

SIZE, LIMIT, BEYOND = GiB, 4 * GiB, 6 * GiB
MEMLOCK = 64 * KiB
TIMEOUT = 60  # seconds
CAP_IPC_LOCK, PR_CAPBSET_DROP = 14, 24
SOURCES = ("VmRSS", "VmLck", "VmPin")


def mapped(nbytes: int) -> Pages:
    pages = map_pages(nbytes)
    touch(pages)
    return pages


def locked(nbytes: int) -> Pages:
    pages = map_pages(nbytes)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlock(ctypes.c_void_p(ctypes.addressof(pages)), ctypes.c_size_t(nbytes)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return pages


def registered(nbytes: int) -> Pages:
    pages = mapped(nbytes)
    pin(pages, torch.cuda.current_device())
    return pages


def driver_made(nbytes: int) -> Core:
    core = Core("cuda", PAGE, nbytes + 64 * PAGE)
    core.allocate(nbytes)
    if core.counts().dram < nbytes - PAGE:
        raise OSError("it does not lie on pages of the host")
    return core


KINDS: dict[str, Callable[[int], object]] = {
    "mapped and touched": mapped,
    "mlock": locked,
    "cudaHostRegister (the arena)": registered,
    "cudaHostAlloc (PyTorch)": lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True),
    "cuMemCreate HOST_NUMA (pages)": driver_made,
}
WITHOUT_GPU = ("mapped and touched", "mlock")


@dataclass(frozen=True)
class Answer:
    """What became of a process that took memory, and what each source counted more after it."""

    grown: dict[str, int]
    outcome: str


def counted() -> dict[str, int]:
    """Bytes by source; `cgroup` is missing where the kernel counts none for this process."""
    status = _fields(Path("/proc/self/status"))
    found = {source: status.get(source, 0) for source in SOURCES}
    for mount, path in hierarchies(Path("/")):
        for folder in (mount / path.strip("/"), mount):  # in a container the path may be the host's
            for name in ("memory.current", "memory.usage_in_bytes"):
                if "cgroup" not in found and (folder / name).exists():
                    found["cgroup"] = int((folder / name).read_text())
    return found | {"machine": -_fields(Path("/proc/meminfo"))["MemAvailable"]}


def _fields(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * KiB for words in lines if words[-1] == "kB"}


def take(kind: str, nbytes: int, cgroup: str) -> None:
    """What a process of its own does."""
    if cgroup:
        (Path(cgroup) / "cgroup.procs").write_text(str(os.getpid()))
    if kind not in WITHOUT_GPU:
        torch.zeros(1, device="cuda")  # the context, and what comes with it, is not what is asked about
        torch.empty(1, pin_memory=True)
    before = counted()
    try:
        kept = KINDS[kind](nbytes)
    except (TiersError, RuntimeError, OSError) as refusal:
        print(json.dumps([{}, f"refused: {str(refusal).splitlines()[0]}"]), flush=True)
    else:
        after = counted()
        print(json.dumps([{source: after[source] - before[source] for source in after}, "granted"]), flush=True)
        del kept
    os._exit(0)  # what was refused may have left the driver in a state that it cannot be ended from


def ask(kind: str, nbytes: int, *, memlock: bool = False, cgroup: Cgroup | None = None) -> Answer:
    """Have a process take `nbytes` of a kind."""
    command = [sys.executable, "-m", "benchmarks.host_memory_accounting", "--kind", kind, "--nbytes", str(nbytes)]
    try:
        done = subprocess.run(
            [*command, "--cgroup", str(cgroup.path) if cgroup else ""],
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
            preexec_fn=_limit_locked if memlock else None,
        )
    except subprocess.TimeoutExpired:
        return Answer({}, f"did not end within {TIMEOUT} s")
    if done.returncode == -signal.SIGKILL:
        return Answer({}, "killed")
    if done.returncode or not done.stdout:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        return Answer({}, f"failed with {done.returncode}: {said[-1]}")
    return Answer(*json.loads(done.stdout.splitlines()[-1]))


def _limit_locked() -> None:
    # Root has the capability again after exec unless it leaves the bounding set; others never had it.
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (MEMLOCK, MEMLOCK))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--nbytes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--cgroup", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kind:
        take(options.kind, options.nbytes, options.cgroup)
    refusal = cgroup_refusal()
    for kind in KINDS if torch.cuda.is_available() else WITHOUT_GPU:
        answer = ask(kind, SIZE)
        print(f"{kind}: {format_size(SIZE)} {answer.outcome}")
        for source, nbytes in answer.grown.items():
            print(f"  {source:8}{nbytes / GiB:+6.2f} GiB")
        print(f"  under ulimit -l {MEMLOCK // KiB} without CAP_IPC_LOCK: {ask(kind, SIZE, memlock=True).outcome}")
        if refusal is None:
            with Cgroup(LIMIT) as cgroup:
                print(f"  {format_size(BEYOND)} under a cgroup limit of {format_size(LIMIT)}:", end=" ")
                answer = ask(kind, BEYOND, cgroup=cgroup)
                print(f"{answer.outcome}; the cgroup's highest {format_size(cgroup.highest())}")
    print(f"cgroup limits: {refusal or 'tried, in a cgroup of its own'}")


if __name__ == "__main__":
    main()
