"""C++ against PyTorch's own headers, which hold for one version of torch only.

It is compiled at first use, and cached under a name made of all that it depends on.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from allocator.errors import TiersError

log = logging.getLogger("tiers")


class CannotBuild(TiersError):
    """C++ cannot be compiled here; the text says what is missing."""


@dataclass(frozen=True)
class Extension:
    """One library.

    Attributes
    ----------
    name, title
        In the file's name, and in what users are told.
    sources, headers
        Our own; it is compiled anew when one changes.
    includes
        Folders of headers besides PyTorch's.
    libraries
        What it is linked to.
    """

    name: str
    title: str
    sources: tuple[Path, ...]
    headers: tuple[Path, ...]
    includes: tuple[Path, ...]
    libraries: tuple[Path, ...]

    def build(self, cache_dir: Path) -> Path:
        """The library for this torch, from `cache_dir` if it has been built before.

        Raises
        ------
        CannotBuild
            If there is no compiler, or it does not compile.
        """
        with_compiler = compiler()
        library = cache_dir / f"{self.name}-{self._fingerprint(with_compiler)}.so"
        if library.exists():
            return library
        cache_dir.mkdir(parents=True, exist_ok=True)
        with open(cache_dir / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the ranks of a job come here together
            if not library.exists():
                log.warning("building %s for torch %s, once; half a minute", self.title, torch.__version__)
                began = time.perf_counter()
                self._compile(with_compiler, library)
                log.warning("built %s in %.0f s: %s", self.title, time.perf_counter() - began, library)
        return library

    def _fingerprint(self, compiler: str) -> str:
        digest = hashlib.sha256()
        parts = (torch.__version__, torch.version.git_version, compiler, *self.includes, *self.libraries)
        for part in parts:
            digest.update(str(part).encode() + b"\0")
        for source in (*self.sources, *self.headers):
            digest.update(source.read_bytes())
        return digest.hexdigest()[:16]

    def _compile(self, compiler: str, library: Path) -> None:
        root = Path(torch.__file__).parent
        partial = Path(tempfile.mkstemp(dir=library.parent, suffix=".so")[1])
        command = [
            compiler,
            *("-std=c++20", "-O2", "-shared", "-fPIC", "-fvisibility=hidden"),
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            *(f"-isystem{path}" for path in (root / "include", *self.includes)),
            *("-o", str(partial), *map(str, self.sources), *map(str, self.libraries)),
            *dict.fromkeys(f"-Wl,-rpath,{path.parent}" for path in self.libraries),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            partial.unlink(missing_ok=True)
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
            raise CannotBuild(f"{self.title} does not compile against torch {torch.__version__}: {first}")
        partial.replace(library)


def compiler() -> str:
    """The C++ compiler's name."""
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if found is None:
        raise CannotBuild("no C++ compiler found (g++ or clang++): install one, or set CXX")
    return found
