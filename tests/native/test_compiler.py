"""Kernels are built once, for this machine, where nobody else can write; without a compiler the reason is told."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine import native
from engine.native import Source, file_cache, library_cache, shared_library

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


def answer(compiler: native.Compiler, source: Path) -> int:
    loaded = shared_library.from_memory(library_cache.build(compiler, Source(source)), source.stem)
    return int(loaded.answer())


def kept() -> list[Path]:
    folder = file_cache.cache_folder()
    assert folder is not None
    return sorted(file for file in folder.iterdir() if not file.name.startswith("compiler-"))


def test_a_source_is_compiled_once_and_again_when_it_changes(tmp_path: Path, compiler: native.Compiler) -> None:
    source = write(tmp_path)
    assert answer(compiler, source) == 42
    (first,) = kept()
    written = first.stat().st_mtime_ns
    assert answer(compiler, source) == 42 and kept() == [first] and first.stat().st_mtime_ns == written
    assert answer(compiler, write(tmp_path, SOURCE.replace("42", "43"))) == 43 and len(kept()) == 2


def test_a_changed_header_beside_the_source_is_a_change(tmp_path: Path, compiler: native.Compiler) -> None:
    source = write(tmp_path, '#include "number.h"\nextern "C" int answer() { return NUMBER; }\n')
    for number in (1, 2):
        (tmp_path / "number.h").write_text(f"#define NUMBER {number}\n")
        assert answer(compiler, source) == number


def test_what_is_old_is_removed(tmp_path: Path, compiler: native.Compiler) -> None:
    folder = file_cache.cache_folder()
    assert folder is not None
    old, other, recent = (folder / name for name in ("kernel-1.so", "other-1.so", "kernel-3.so"))
    for path in (old, other, recent):
        path.touch()
    for path in (old, other):
        os.utime(path, (0, 0))
    library_cache.build(compiler, Source(write(tmp_path)))
    assert len(kept()) == 3 and {other, recent} < {*kept()}


def test_a_source_that_does_not_compile_is_told_with_the_compilers_words(
    tmp_path: Path, compiler: native.Compiler
) -> None:
    source = write(tmp_path, "int answer() { return no_such_name; }")
    with pytest.raises(native.NativeError) as caught:
        library_cache.build(compiler, Source(source))
    for words in ("kernel.cpp", *compiler.command, "no_such_name", "CXX", "execution=eager"):
        assert words in str(caught.value)
    assert kept() == []


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


@pytest.mark.usefixtures("search")
def test_a_compiler_is_tried_once_and_again_when_its_program_changes(
    tmp_path: Path, compiler: native.Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every process asks, and trying takes half a second."""
    mine, asked = tmp_path / "my-cxx", tmp_path / "asked"
    text = f'#!/bin/sh\necho "$@" >> {asked}\necho one\n[ "$1" = --version ] || exec {compiler.command[0]} "$@"\n'

    def found() -> native.Compiler | str:
        native.find_compiler.cache_clear()
        return native.find_compiler()

    mine.write_text(text)
    mine.chmod(0o755)
    monkeypatch.setenv("CXX", str(mine))
    assert found() == found() == native.Compiler((str(mine),), "one")
    assert len(asked.read_text().splitlines()) == 2, "--version, and a program"
    mine.write_text(text.replace("echo one", "echo other"))
    assert found() == native.Compiler((str(mine),), "other")


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


def test_libraries_that_are_loaded_one_after_the_other_are_not_confused(
    tmp_path: Path, compiler: native.Compiler
) -> None:
    """The system's loader takes a library that is loaded already for the one asked for, if their paths are equal."""
    libraries = []
    for number in (1, 2, 3):
        built = library_cache.build(compiler, Source(write(tmp_path, SOURCE.replace("42", str(number)))))
        libraries.append(shared_library.from_memory(built, "kernel"))
    assert [library.answer() for library in libraries] == [1, 2, 3]


def test_a_kept_library_that_does_not_load_here_is_built_again(tmp_path: Path, compiler: native.Compiler) -> None:
    """Whole, but of a machine with other system libraries."""
    source = write(tmp_path)
    library_cache.build(compiler, Source(source))
    (file,) = kept()
    file_cache._write(file, b"of another machine")
    assert native.load(source, {}).answer() == 42
    assert answer(compiler, source) == 42


def test_a_library_that_does_not_load_where_it_was_built_is_an_error(
    tmp_path: Path, compiler: native.Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native.Compiler, "compile", lambda *_: b"no library")
    with pytest.raises(native.NativeError, match=r"kernel\.cpp was just built and does not load: .*execution=eager"):
        native.load(write(tmp_path), {})


def test_a_library_that_cannot_be_kept_is_loaded_with_a_warning(
    tmp_path: Path, compiler: native.Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match=r"kernel-\w+\.so is made anew at every start: .*No space left"):
        assert native.load(write(tmp_path), {}).answer() == 42
    assert kept() == []


def test_without_a_temporary_folder_kept_libraries_load_and_others_say_why(
    tmp_path: Path, compiler: native.Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    source = write(tmp_path)
    assert answer(compiler, source) == 42
    monkeypatch.setattr(tempfile, "gettempdir", none)
    assert answer(compiler, source) == 42
    with pytest.raises(native.NativeError, match="No usable temporary directory"):
        library_cache.build(compiler, Source(write(tmp_path, SOURCE.replace("42", "43"))))


@pytest.mark.usefixtures("search")
def test_cxx_may_name_an_older_processor(
    tmp_path: Path, compiler: native.Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its libraries are not taken for those of this one."""
    source = write(
        tmp_path,
        '#ifdef __AVX__\nextern "C" int answer() { return 1; }\n#else\nextern "C" int answer() { return 0; }\n#endif\n',
    )
    here = answer(compiler, source)
    monkeypatch.setenv("CXX", f"{compiler.command[0]} -march=x86-64")
    native.find_compiler.cache_clear()
    older = native.find_compiler()
    assert not isinstance(older, str) and "-march=native" not in older.build
    assert answer(older, source) == 0 and answer(compiler, source) == here
    assert len(kept()) == 2


def test_rates_are_measured_once_for_a_source(tmp_path: Path, compiler: native.Compiler) -> None:
    source, measured = write(tmp_path), iter([{"one": 1.5, "other": 2.0}, {"one": 3.0, "other": 2.0}])

    def rates() -> dict[str, float]:
        return library_cache.rates(compiler, Source(source), ("one", "other"), lambda: next(measured))

    assert rates() == rates() == {"one": 1.5, "other": 2.0}
    write(tmp_path, SOURCE.replace("42", "43"))
    assert rates() == {"one": 3.0, "other": 2.0}


def test_rates_of_a_process_that_may_use_less_are_its_own(tmp_path: Path, compiler: native.Compiler) -> None:
    """Whichever starts first."""
    source, first, second = write(tmp_path), {"one": 1.0}, {"one": 2.0, "other": 3.0}
    for _ in range(2):
        for rates in (first, second):
            assert library_cache.rates(compiler, Source(source), tuple(rates), rates.copy) == rates
    assert len(kept()) == 2


def test_of_two_that_measure_at_the_same_time_both_take_what_the_first_has_kept(
    tmp_path: Path, compiler: native.Compiler
) -> None:
    source = write(tmp_path)

    def rates(measure: Callable[[], dict[str, float]]) -> dict[str, float]:
        return library_cache.rates(compiler, Source(source), ("one",), measure)

    def late() -> dict[str, float]:
        assert rates(lambda: {"one": 1.0}) == {"one": 1.0}
        return {"one": 2.0}

    assert rates(late) == rates(late) == {"one": 1.0}


def test_rates_that_somebody_changed_are_measured_again(tmp_path: Path, compiler: native.Compiler) -> None:
    source = write(tmp_path)
    library_cache.rates(compiler, Source(source), ("one",), lambda: {"one": 1.0})
    (file,) = kept()
    file.write_bytes(file.read_bytes().replace(b"1.0", b"9.0"))
    with pytest.warns(UserWarning, match="cannot be used and is made again"):
        again = library_cache.rates(compiler, Source(source), ("one",), lambda: {"one": 2.0})
    assert again == {"one": 2.0} == library_cache.rates(compiler, Source(source), ("one",), lambda: {"one": 3.0})


def test_where_nothing_can_be_kept_rates_are_measured_with_a_warning(
    tmp_path: Path, compiler: native.Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_all = tmp_path / "of_all"
    of_all.mkdir()
    of_all.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(of_all))
    for rate in (1.0, 2.0):
        with pytest.warns(UserWarning, match="compiled and measured anew at every start"):
            found = library_cache.rates(compiler, Source(write(tmp_path)), (), lambda rate=rate: {"one": rate})
        assert found == {"one": rate}
