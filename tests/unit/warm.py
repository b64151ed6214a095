"""Runs programs as `python` does, forked off a process that has imported torch, which takes seconds of CPU time.

`run` is for a test's own programs, and `interpreter` for those that code under test starts by `sys.executable`. For
programs that are to start cold (how Python or torch starts is what is tested) there is `cold`.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import CodeType
from unittest import mock

ROOT = Path(__file__).parents[2]
AT_THE_START = ("CUDA_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "TORCH")
"""Variables of these names are read while Python or torch start, so a program shares them with its server."""
LATER = ("PYTHONPATH", "TORCH_DEVICE_BACKEND_AUTOLOAD")
"""Variables among these of which a program may have its own: what they ask for is done after the fork."""
OF_SERVERS = ("LC_CTYPE", "OPENBLAS_NUM_THREADS")
"""Set by Python for its children, and here."""
LONGEST = 1 << 20  # bytes of a request
SERVER = f"exec(__import__({__name__!r}, fromlist=['serve']).serve(%s))"
ON_DEMAND = "torch._dynamo"
"""What any optimizer imports at its first use."""


def run(
    code: str, *arguments: str, env: Mapping[str, str], cwd: Path = ROOT, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program that imports torch, with the entry points of torch off, and return how it ended."""
    if env.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0":
        return cold(code, *arguments, env=env, cwd=cwd, timeout=timeout)
    control = _server(_at_the_start(env))
    request = json.dumps([["-c", code, *arguments], dict(env), str(cwd)]).encode()
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


@contextmanager
def interpreter() -> Iterator[None]:
    """Have `sys.executable` start programs (-c, -m or a file) warm.

    Who starts one sees a process as ever, but for this: the program itself is another one, with the same files and the
    same end. It is killed with the first, a moment later.
    """
    with mock.patch.object(sys, "executable", _executable(_at_the_start(os.environ))):
        yield


def _at_the_start(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, environ[name]) for name in environ if name.startswith(AT_THE_START)))


@functools.cache
def _executable(environ: tuple[tuple[str, str], ...]) -> str:
    directory = tempfile.TemporaryDirectory(prefix="tiers-warm-")  # which nobody else may enter
    atexit.register(directory.cleanup)
    listening = Path(directory.name) / "socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(listening))
        listener.listen(64)
        _server((*environ, ("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")), listener.fileno())
    script = Path(directory.name) / "python"
    command = shlex.join([sys.executable, "-IS", str(Path(__file__).with_name("warm_client.py")), str(listening)])
    script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    script.chmod(0o700)
    return str(script)


@functools.cache
def _server(environ: tuple[tuple[str, str], ...], listener: int = -1) -> socket.socket:
    """Start a server with these variables, which ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for each in (ours, theirs):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * LONGEST)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER % f"{theirs.fileno()}, {listener}"],
            cwd=ROOT,
            env={"PATH": os.environ["PATH"], "OPENBLAS_NUM_THREADS": "1", **dict(environ)},
            pass_fds=[theirs.fileno(), *([listener] if listener >= 0 else [])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def serve(descriptor: int, listener: int = -1) -> CodeType:
    """Import torch and fork for each request; return in the child alone, with the code to run in `__main__`."""
    started = _at_the_start(os.environ)
    __import__("torch")
    __import__(ON_DEMAND)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack the threads that torch has started"
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "torch_tiers")]:
        del sys.modules[name]
    gc.freeze()  # else the end of each fork goes through all that torch consists of, and copies it to do so
    sources = [socket.socket(fileno=each) for each in (descriptor, listener) if each >= 0]
    while True:
        source = select.select(sources, [], [])[0][0]
        asker = source if source is sources[0] else source.accept()[0]
        request, descriptors, _, _ = socket.recv_fds(asker, LONGEST, 4)
        if asker is not source:
            asker.close()
        elif not request:
            os._exit(0)
        if request and os.fork() == 0:
            break
        for each in descriptors:
            os.close(each)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    for source in sources:
        source.close()
    *standard, tell = descriptors
    if child := os.fork():
        for each in standard:
            os.close(each)
        _see_to(child, tell)
    os.close(tell)
    for target, each in enumerate(standard):
        os.dup2(each, target)
        os.close(each)
    words, environ, cwd = json.loads(request)
    return _begin(words, environ, cwd, dict(started))


def _see_to(child: int, tell: int) -> None:
    """Tell the child's number and how it ends; end it where nobody listens any longer."""
    os.write(tell, f"{child}\n".encode())
    ends = os.pidfd_open(child)
    if ends not in select.select([ends, tell], [], [])[0]:
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with suppress(BrokenPipeError):
        os.write(tell, f"{status}\n".encode())
    os._exit(0)


def _begin(words: Sequence[str], environ: Mapping[str, str], cwd: str, started: Mapping[str, str]) -> CodeType:
    """Make this process what `python` with these words would be; return what it would run in `__main__`."""
    differ = started.items() ^ dict(_at_the_start(environ)).items()
    if wrong := {name for name, _ in differ}.difference(LATER, OF_SERVERS):
        sys.exit(f"a program that is forked off a warm one cannot have its own {', '.join(sorted(wrong))}")
    own = {name: value for name, value in os.environ.items() if name == "LC_CTYPE"}  # set by Python for its children
    before = started.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(own | environ)
    os.chdir(cwd)
    what, *arguments = words
    file = "<string>"
    if what == "-c":
        code, *arguments = arguments
        first, name = "", "-c"
    elif what == "-m":
        name, *arguments = arguments
        first, code = cwd, f"__import__('runpy')._run_module_as_main({name!r})"
    else:
        assert not what.startswith("-"), f"a warm program takes no {what}"
        first, name = str(Path(what).resolve().parent), what
        file = vars(sys.modules["__main__"])["__file__"] = str(Path(what).absolute())
        code = Path(what).read_text()
    sys.argv[:] = [name, *arguments]
    sys.path[0] = first
    sys.path[1:1] = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in before]
    if environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0":
        sys.modules["torch"]._import_device_backends()  # as `import torch` does at its end
    return compile(code, file, "exec", dont_inherit=True)
