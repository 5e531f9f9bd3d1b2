"""Kernels are built once, for this machine, where nobody else can write; without a compiler the reason is told."""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine import native
from engine.native import compiler as compilers

SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> native.Compiler:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = native.find_compiler()
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.fixture
def search() -> Iterator[None]:
    """The compiler is looked for anew, in the test and after it."""
    native.find_compiler.cache_clear()
    yield
    native.find_compiler.cache_clear()


def write(folder: Path, text: str = SOURCE) -> Path:
    source = folder / "kernel.cpp"
    source.write_text(text)
    return source


def test_a_source_is_compiled_once_and_again_when_it_changes(tmp_path: Path, compiler: native.Compiler) -> None:
    source = write(tmp_path)
    first = compiler.build(source)
    assert ctypes.CDLL(str(first)).answer() == 42
    written = first.stat().st_mtime_ns
    assert compiler.build(source) == first and first.stat().st_mtime_ns == written
    second = compiler.build(write(tmp_path, SOURCE.replace("42", "43")))
    assert second != first and ctypes.CDLL(str(second)).answer() == 43


def test_a_changed_header_beside_the_source_is_a_change(tmp_path: Path, compiler: native.Compiler) -> None:
    source = write(tmp_path, '#include "number.h"\nextern "C" int answer() { return NUMBER; }\n')
    for number in (1, 2):
        (tmp_path / "number.h").write_text(f"#define NUMBER {number}\n")
        assert ctypes.CDLL(str(compiler.build(source))).answer() == number


def test_a_library_damaged_in_the_cache_is_built_again(tmp_path: Path, compiler: native.Compiler) -> None:
    source = write(tmp_path)
    compiler.build(source).write_bytes(b"")
    assert native.load(source, {}).answer() == 42


def test_what_is_old_or_was_left_behind_is_removed(tmp_path: Path, compiler: native.Compiler) -> None:
    folder = compilers.cache_folder()
    old, other, killed, recent = (
        folder / name for name in ("kernel-1.so", "other-1.so", "kernel-2.1.tmp", "kernel-3.so")
    )
    for path in (old, other, killed, recent):
        path.touch()
    for path in (old, other, killed):
        os.utime(path, (0, 0))
    built = compiler.build(write(tmp_path))
    assert {*folder.iterdir()} == {built, other, recent}


def test_only_the_user_may_write_where_libraries_lie(tmp_path: Path, compiler: native.Compiler) -> None:
    folder = compilers.cache_folder()
    assert folder.is_relative_to(tmp_path) and stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)
    with pytest.warns(UserWarning, match="compiled anew"):
        assert not compilers.cache_folder().is_relative_to(tmp_path)


def test_a_source_that_does_not_compile_is_told_with_the_compilers_words(
    tmp_path: Path, compiler: native.Compiler
) -> None:
    source = write(tmp_path, "int answer() { return no_such_name; }")
    with pytest.raises(native.NativeError) as caught:
        compiler.build(source)
    for words in ("kernel.cpp", *compiler.command, "no_such_name", "CXX", "execution=eager"):
        assert words in str(caught.value)
    assert not list(compilers.cache_folder().iterdir())


@pytest.mark.usefixtures("search")
def test_without_a_compiler_the_reason_names_what_was_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    reason = native.find_compiler()
    assert isinstance(reason, str) and "g++" in reason and "execution=eager" in reason


@pytest.mark.usefixtures("search")
@pytest.mark.parametrize("value", [" ", "g++ '"])
def test_a_strange_cxx_is_no_crash(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", value)
    found = native.find_compiler()
    assert not value.strip() or (isinstance(found, str) and value in found)


@pytest.mark.usefixtures("search")
def test_a_compiler_that_fails_is_not_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "my-cxx"
    broken.write_text('#!/bin/sh\n[ "$2" = --version ] && echo mine && exit\necho no OpenMP here >&2\nexit 1\n')
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", f"{broken} -fsome-flag")
    reason = native.find_compiler()
    assert isinstance(reason, str) and str(broken) in reason and "no OpenMP here" in reason


def test_kernels_share_torchs_threads(tmp_path: Path, compiler: native.Compiler) -> None:
    """A second OpenMP library would start a second team of threads that fight for the same cores."""
    text = '#include <omp.h>\nextern "C" int threads() { return omp_get_max_threads(); }\n'
    library = native.load(write(tmp_path, text), {})
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert library.threads() == 3
    finally:
        torch.set_num_threads(before)
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    assert len(loaded) == 1
