"""Runs programs as `python -c` does, forked off a process that has imported torch, which takes seconds of CPU time.

For programs that are to start cold (how Python or torch starts is what is tested) there is `cold`.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).parents[2]
AT_THE_START = ("CUDA_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "TORCH")
"""Variables of these names are read while Python or torch start, so a program shares them with its server."""
LONGEST = 1 << 20  # bytes of a request
SERVER = f"exec(__import__({__name__!r}, fromlist=['serve']).serve(%d))"
ON_DEMAND = "torch._dynamo"
"""What any optimizer imports at its first use."""


def run(
    code: str, *arguments: str, env: Mapping[str, str], cwd: Path = ROOT, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program that imports torch, with the entry points of torch off, and return how it ended."""
    if env.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0":
        return cold(code, *arguments, env=env, cwd=cwd, timeout=timeout)
    control = _server(tuple(sorted((name, env[name]) for name in env if name.startswith(AT_THE_START))))
    request = json.dumps([code, arguments, dict(env), str(cwd)]).encode()
    assert len(request) < LONGEST
    ours, theirs = socket.socketpair()
    with ours, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull) as nothing:
        with theirs:
            descriptors = [nothing.fileno(), out.fileno(), err.fileno(), theirs.fileno()]
            socket.send_fds(control, [request], descriptors)
        with ours.makefile() as told:
            pid = int(told.readline())
            ours.settimeout(timeout)
            try:
                status = int(told.readline())
            except BaseException as error:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                if isinstance(error, TimeoutError):
                    raise subprocess.TimeoutExpired(code, timeout or 0) from error
                raise
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess([sys.executable, "-c", code, *arguments], status, *texts)


def cold(
    code: str, *arguments: str, env: Mapping[str, str], cwd: Path = ROOT, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program in a Python of its own."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=timeout)


@functools.cache
def _server(environ: tuple[tuple[str, str], ...]) -> socket.socket:
    """Start a server with these variables, which ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for each in (ours, theirs):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * LONGEST)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER % theirs.fileno()],
            cwd=ROOT,
            env={"PATH": os.environ["PATH"], "OPENBLAS_NUM_THREADS": "1", **dict(environ)},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def serve(descriptor: int) -> CodeType:
    """Import torch and fork for each request; return in the child alone, with the code to run in `__main__`."""
    __import__("torch")
    __import__(ON_DEMAND)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack the threads that torch has started"
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "torch_tiers")]:
        del sys.modules[name]
    gc.freeze()  # else the end of each fork goes through all that torch consists of, and copies it to do so
    with socket.socket(fileno=descriptor) as control:
        while True:
            request, descriptors, _, _ = socket.recv_fds(control, LONGEST, 4)
            if not request:
                os._exit(0)
            if os.fork() == 0:
                break
            for each in descriptors:
                os.close(each)
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
    *standard, tell = descriptors
    if child := os.fork():
        for each in standard:
            os.close(each)
        os.write(tell, f"{child}\n".encode())
        os.write(tell, f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n".encode())
        os._exit(0)
    os.close(tell)
    for target, each in enumerate(standard):
        os.dup2(each, target)
        os.close(each)
    code, arguments, environ, cwd = json.loads(request)
    own = {name: value for name, value in os.environ.items() if name == "LC_CTYPE"}  # set by Python for its children
    os.environ.clear()
    os.environ.update(own | environ)
    os.chdir(cwd)
    sys.argv[1:] = arguments
    return compile(code, "<string>", "exec", dont_inherit=True)
