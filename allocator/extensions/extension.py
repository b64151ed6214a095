"""Compiles C++ against the headers of the installed PyTorch, which fit that version only.

A library is compiled at its first use, and cached under a name that hashes all that it depends on.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from torch_tiers.allocator.errors import TiersError
from torch_tiers.allocator.private import WRITABLE, is_ours, make_directory

log = logging.getLogger("tiers")

_FLAGS = ("-std=c++20", "-O2", "-shared", "-fPIC", "-fvisibility=hidden")


class CannotBuild(TiersError):
    """C++ cannot be compiled here; the text says what is missing."""


@dataclass(frozen=True)
class Extension:
    """One library of C++.

    Attributes
    ----------
    name, title
        In the file's name, and in messages.
    sources, headers
        Our own; it is compiled anew when one changes.
    includes
        Folders of headers besides PyTorch's.
    libraries
        What it is linked to.
    needs
        Called before it is compiled; raises CannotBuild if something is missing.
    """

    name: str
    title: str
    sources: tuple[Path, ...]
    headers: tuple[Path, ...]
    includes: tuple[Path, ...]
    libraries: tuple[Path, ...]
    needs: Callable[[], object] = lambda: None

    def build(self, cache_dir: Path) -> Path:
        """The library for this torch, from `cache_dir` if it has been built before.

        Raises
        ------
        CannotBuild
            If it is not there and there is no compiler, or it does not compile; or if `cache_dir` cannot be written, or
            others may write to it.
        """
        try:
            # Without links, which may lead elsewhere by then: what is looked at is what is loaded.
            cache_dir = make_directory(cache_dir).resolve()
            library = cache_dir / f"{self.name}-{self._fingerprint()}.so"
            self._refuse_what_others_write(cache_dir)
            if not _is_ours(library):
                self.needs()
                self._build(compiler(), library, cache_dir)
        except OSError as error:
            raise CannotBuild(f"{self.title} cannot be built in {cache_dir}: {error}") from error
        return library

    def obstacle(self, cache_dir: Path) -> str | None:
        """Why it cannot be built in `cache_dir`, found out without building it; None if no reason is known."""
        if _is_ours(cache_dir / f"{self.name}-{self._fingerprint()}.so"):
            return None
        return obstacle_to(self.needs, compiler)

    def _refuse_what_others_write(self, cache_dir: Path) -> None:
        found = cache_dir.stat()
        if found.st_uid != os.geteuid():
            reason, advice = "it belongs to another user", "set XDG_CACHE_HOME to a directory of this user's"
        elif not is_ours(found):
            reason, advice = "others may write to it", f"chmod go-w {shlex.quote(str(cache_dir))}"
        elif (parent := next(filter(_lets_others_rename, cache_dir.parents), None)) is not None:
            reason = f"others may write to {parent} above it"
            advice = f"chmod go-w {shlex.quote(str(parent))}, or set XDG_CACHE_HOME to a directory of this user's"
        else:
            return
        raise CannotBuild(
            f"{self.title} is not loaded from {cache_dir}: {reason}, and could put there what we run; {advice}"
        )

    def _build(self, with_compiler: list[str], library: Path, cache_dir: Path) -> None:
        with open(cache_dir / f"{self.name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the ranks of a job come here together
            if not _is_ours(library):
                log.warning("building %s for torch %s, once; half a minute", self.title, torch.__version__)
                began = time.perf_counter()
                self._compile(with_compiler, library)
                log.warning("built %s in %.0f s: %s", self.title, time.perf_counter() - began, library)

    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        versions = (torch.__version__, torch.version.git_version, platform.machine())
        # A compiler that was named, with its flags, but none that was found: what it has made is run without it, too.
        parts = (*versions, os.environ.get("CXX", ""), *_FLAGS, *self.includes, *self.libraries)
        for part in parts:
            digest.update(str(part).encode() + b"\0")
        for source in (*self.sources, *self.headers):
            digest.update(source.read_bytes())
        return digest.hexdigest()[:16]

    def _compile(self, with_compiler: list[str], library: Path) -> None:
        root = Path(torch.__file__).parent
        descriptor, name = tempfile.mkstemp(dir=library.parent, suffix=".so")
        os.close(descriptor)
        partial = Path(name)
        command = [
            *with_compiler,
            *_FLAGS,
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            *(f"-isystem{path}" for path in (root / "include", *self.includes)),
            *("-o", str(partial), *map(str, self.sources), *map(str, self.libraries)),
            *dict.fromkeys(f"-Wl,-rpath,{path.parent}" for path in self.libraries),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
            if not done.returncode:
                partial.chmod(0o700)  # the linker has made it anew, as the umask has it
                partial.replace(library)
        finally:
            partial.unlink(missing_ok=True)
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
            raise CannotBuild(f"{self.title} does not compile against torch {torch.__version__}: {first}")


def _lets_others_rename(directory: Path) -> bool:
    """Whether others may put a directory of theirs in the place of one in it that is not theirs."""
    mode = directory.stat().st_mode
    return bool(mode & WRITABLE) and not mode & stat.S_ISVTX


def _is_ours(library: Path) -> bool:
    """Whether `library` is there, and by nobody else: such a one is built anew, in its place."""
    try:
        found = library.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(found.st_mode) and is_ours(found)


def obstacle_to(*needs: Callable[[], object]) -> str | None:
    """The message of the first of `needs` that fails, which says what is missing; None if none does."""
    try:
        for need in needs:
            need()
    except TiersError as missing:
        return str(missing)
    return None


def compiler() -> list[str]:
    """The command of the C++ compiler.

    Raises
    ------
    CannotBuild
        If there is none, or what names it cannot be read.
    """
    try:
        asked = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise CannotBuild(f"CXX cannot be read: {error}; correct or unset it") from None
    if asked:
        if shutil.which(asked[0]) is None:
            raise CannotBuild(f"CXX names no program: {asked[0]}; correct or unset it")
        return asked
    found = shutil.which("g++") or shutil.which("clang++")
    if found is None:
        raise CannotBuild("no C++ compiler found (g++ or clang++): install one, or set CXX")
    return [found]
