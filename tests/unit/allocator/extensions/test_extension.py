"""What is compiled at first use: one line says what is in the way, and nothing is left behind."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from torch_tiers.allocator.extensions.extension import CannotBuild, Extension, compiler
from torch_tiers.migrator.saved import native
from torch_tiers.session import session


def extension(source: Path, text: str) -> Extension:
    source.write_text(text)
    return Extension("small", "a small library", (source,), (), (), ())


def test_it_is_compiled_once(tmp_path: Path) -> None:
    small = extension(tmp_path / "small.cpp", "int f() { return 1; }")
    before = len(os.listdir("/proc/self/fd"))
    library = small.build(tmp_path / "cache")
    made = library.stat().st_mtime_ns
    assert small.build(tmp_path / "cache") == library
    assert library.stat().st_mtime_ns == made
    assert {path.name for path in library.parent.iterdir()} == {library.name, "small.lock"}
    assert len(os.listdir("/proc/self/fd")) == before


def test_another_source_is_another_library(tmp_path: Path) -> None:
    one = extension(tmp_path / "small.cpp", "int f() { return 1; }").build(tmp_path)
    assert extension(tmp_path / "small.cpp", "int f() { return 2; }").build(tmp_path) != one


def test_what_does_not_compile_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    small = extension(tmp_path / "small.cpp", "nonsense")
    with pytest.raises(CannotBuild, match=r"a small library does not compile against torch .*error"):
        small.build(tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["small.lock"]


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotBuild, match=r"a small library cannot be built in .*/file/cache"):
        extension(tmp_path / "small.cpp", "int x;").build(tmp_path / "file" / "cache")


def test_a_compiler_may_come_with_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setenv("CXX", "ccache g++")
    assert compiler() == ["ccache", "g++"]


def test_a_compiler_that_is_none_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++ -O3")
    with pytest.raises(CannotBuild, match="CXX names no program: /nowhere/g"):
        compiler()
    assert "CXX names no program" in (native.MODULE.obstacle(tmp_path) or "")


def test_a_compiler_whose_quotes_are_not_closed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ -DX='1")
    with pytest.raises(CannotBuild, match="CXX cannot be read: No closing quotation; correct or unset it"):
        compiler()


def test_what_has_been_built_is_had_where_there_is_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on the nodes of a cluster that share a home."""
    monkeypatch.delenv("CXX", raising=False)
    small = extension(tmp_path / "small.cpp", "int f() { return 1; }")
    library = small.build(tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert small.obstacle(tmp_path) is None and small.build(tmp_path) == library
    (tmp_path / "small.cpp").write_text("int f() { return 2; }")
    assert "no C++ compiler found" in (small.obstacle(tmp_path) or "")
    with pytest.raises(CannotBuild, match=r"no C\+\+ compiler found"):
        small.build(tmp_path)


def test_the_hooks_are_compiled_anew_when_any_part_of_them_changes() -> None:
    parts = {native.MODULE.source, *native.MODULE.headers}
    assert parts == {path for path in native.MODULE.source.parent.iterdir() if path.suffix in (".cpp", ".h")}


def test_where_the_hooks_cannot_be_compiled_training_is_an_error_that_says_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    model, x = nn.Linear(4, 4), torch.zeros(2, 4)
    with session(allocator="torch"):
        with torch.no_grad():
            model(x)  # which trains nothing
        with pytest.raises(CannotBuild, match=r"no program: /nowhere/.* without `tiers run`, TIERS_ALLOCATOR"):
            model(x)


def test_a_library_that_does_not_load_is_said(tmp_path: Path) -> None:
    (tmp_path / "tensors.so").write_text("no library")
    with pytest.raises(CannotBuild, match=r"does not load: .*; remove .*tensors.so to have it built again"):
        native.load(tmp_path / "tensors.so")


# --------------------------------------------------------------------------------------- what is not ours alone


@pytest.fixture
def any_umask() -> Iterator[None]:
    """What is made is open to everybody, unless its maker sees to it."""
    before = os.umask(0)
    yield
    os.umask(before)


def test_what_is_built_is_this_users_alone_whatever_the_umask(tmp_path: Path, any_umask: None) -> None:
    library = extension(tmp_path / "small.cpp", "int x;").build(tmp_path / "home" / "cache")
    for path in (library, library.parent, library.parent.parent):
        assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(("mode", "serves"), [(0o775, False), (0o757, False), (0o1777, True), (0o755, True)])
def test_nothing_is_loaded_from_below_a_directory_in_which_others_may_rename(
    tmp_path: Path, mode: int, serves: bool
) -> None:
    parent = tmp_path / "shared"
    (parent / "mine" / "cache").mkdir(parents=True)
    parent.chmod(mode)
    (tmp_path / "link").symlink_to(parent / "mine")
    small = extension(tmp_path / "small.cpp", "int x;")
    if serves:
        assert small.build(tmp_path / "link" / "cache").parent == parent / "mine" / "cache"
        return
    with pytest.raises(CannotBuild, match=r"others may write to .*/shared above it, and could put there what we run"):
        small.build(tmp_path / "link" / "cache")


def test_a_directory_that_others_may_read_serves(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o755)
    assert extension(tmp_path / "small.cpp", "int x;").build(tmp_path / "cache").exists()


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o1777])
def test_nothing_is_loaded_from_a_directory_that_others_may_write_to(tmp_path: Path, mode: int) -> None:
    cache, small = tmp_path / "cache", extension(tmp_path / "small.cpp", "int x;")
    small.build(cache)
    cache.chmod(mode)
    with pytest.raises(CannotBuild, match=r"not loaded from .*: others may write to it, .*; chmod go-w .*/cache"):
        small.build(cache)


def test_nothing_is_loaded_from_somebody_elses_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = extension(tmp_path / "small.cpp", "int x;")
    small.build(tmp_path / "cache")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(CannotBuild, match=r"belongs to another user, .*; set XDG_CACHE_HOME"):
        small.build(tmp_path / "cache")


def test_a_library_that_others_may_have_written_is_built_anew(tmp_path: Path) -> None:
    small = extension(tmp_path / "small.cpp", "int x;")
    library = small.build(tmp_path / "cache")
    library.write_text("theirs")
    library.chmod(0o775)
    assert small.build(tmp_path / "cache").read_bytes()[1:4] == b"ELF"
    assert library.stat().st_mode & 0o022 == 0


def test_a_link_in_the_place_of_a_library_is_built_over(tmp_path: Path) -> None:
    small = extension(tmp_path / "small.cpp", "int x;")
    library = small.build(tmp_path / "cache")
    (tmp_path / "theirs").write_text("theirs")
    library.unlink()
    library.symlink_to(tmp_path / "theirs")
    small.build(tmp_path / "cache")
    assert not library.is_symlink()
    assert (tmp_path / "theirs").read_text() == "theirs"
