"""What is compiled ahead is compiled once, handed out from memory, and fails where it is asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine import native
from engine.native import Source, ahead, file_cache, library_cache, shared_library
from tests.native import needs_compiler

pytestmark = needs_compiler

ANSWER = 'extern "C" int answer() { return ANSWER; }\n'
START = """
import sys
from pathlib import Path
from engine.native import Source, ahead, shared_library
sources = [Source(Path(sys.argv[1]), (f"ANSWER={number}",)) for number in range(3)]
print("ready", flush=True)
sys.stdin.readline()
ahead.begin(sources)
print([shared_library.open_library(source).answer() for source in sources])
"""
"""A process that starts when it is told to."""


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Source]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "kernel.cpp"
    file.write_text(ANSWER)
    return [Source(file, (f"ANSWER={number}",)) for number in (7, 8)]


def answers(sources: list[Source]) -> list[int]:
    return [shared_library.open_library(source).answer() for source in sources]


def kept() -> list[str]:
    folder = file_cache.cache_folder()
    assert folder is not None
    return sorted(file.name.partition("-")[0] for file in folder.glob("*.so"))


def test_one_file_is_a_library_for_each_of_its_macros(sources: list[Source]) -> None:
    ahead.begin(sources)
    ahead.finish()
    assert kept() == ["kernel.7", "kernel.8"] and ahead.unfinished() == 0
    assert answers(sources) == [7, 8]


def test_what_was_begun_is_not_compiled_again(sources: list[Source], monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_one = native.Compiler.compile

    def counted(self: native.Compiler, source: Source) -> bytes:
        compiled.append(source.name)
        return compile_one(self, source)

    monkeypatch.setattr(native.Compiler, "compile", counted)
    ahead.begin(sources)
    ahead.begin([*sources, *sources])
    assert answers(sources) == [7, 8]
    ahead.begin(sources)
    assert sorted(compiled) == ["kernel.7", "kernel.8"] and ahead.unfinished() == 0


def test_what_earlier_starts_left_is_not_compiled(sources: list[Source], monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = native.find_compiler()
    assert not isinstance(compiler, str)
    for source in sources:
        library_cache.build(compiler, source)
    monkeypatch.setattr(native.Compiler, "compile", lambda self, source: pytest.fail(f"{source.name} is compiled"))
    ahead.begin(sources)
    assert ahead.unfinished() == 0 and answers(sources) == [7, 8]


def test_a_source_that_does_not_compile_fails_where_it_is_asked_for(sources: list[Source]) -> None:
    broken = Source(sources[0].file)
    ahead.begin([broken, sources[0]])
    ahead.finish()
    assert answers(sources[:1]) == [7]
    with pytest.raises(native.NativeError, match=r"kernel\.cpp does not compile .*execution=eager(?s:.*)ANSWER"):
        shared_library.open_library(broken)
    assert kept() == ["kernel.7"]


def test_processes_that_start_at_once_with_an_empty_cache_all_get_whole_libraries(sources: list[Source]) -> None:
    command = [sys.executable, "-c", START, str(sources[0].file)]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in started:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in started:
        out, errors = process.communicate(timeout=120)
        assert out == "[0, 1, 2]\n", errors[-3000:]
    assert kept() == ["kernel.0", "kernel.1", "kernel.2"]
