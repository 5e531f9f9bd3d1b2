"""``engine kv`` on a folder: :mod:`engine_plugins.kv_store.command.command`,
:mod:`engine_plugins.kv_store.command.words` and :mod:`engine_plugins.kv_store.command.folder`."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
from tests.plugins.kv_store.command.test_archive import SPACES, contents, records

from engine.cli.main import main
from engine_plugins.kv_store.command import command, folder, words
from engine_plugins.kv_store.record_files import CLEARING


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in SPACES:
        records(tmp_path / "kv", name, 6)
    return tmp_path / "kv"


def run(root: Path, *said: str) -> int:
    return main(["kv", *said, "--path", str(root)])


def test_its_help_has_every_form() -> None:
    for action, form in words.FORMS.items():
        assert " ".join(("engine kv", action, *form)) in command.NOTES


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ([], "say what to do; expected one of ls, stats"),
        (["list"], "no such action 'list'"),
        (["clear"], "clear needs NAMESPACE|all: engine kv clear NAMESPACE|all"),
        (["clear", ""], "an empty word is no NAMESPACE|all"),
        (["export"], "export needs FILE"),
        (["ls", "more"], "unexpected 'more'"),
        (["stats", "127.0.0.1:8000"], "expected http://HOST:PORT"),
    ],
)
def test_words_that_make_no_sense_are_wrong_usage(said: list[str], says: str, capsys) -> None:
    assert main(["kv", *said]) == 2 and says in capsys.readouterr().err


def test_namespaces_are_listed_with_what_they_are_of(root: Path, capsys) -> None:
    (root / SPACES[0] / "new-0123456789abcdef-1").write_bytes(b"x")
    assert run(root, "ls") == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("abababababab", "tiny, float32", "6 +1")) and "\n" in shown
    assert run(root, "ls", "--json") == 0
    found = {one["namespace"]: one for one in json.loads(capsys.readouterr().out)}
    assert found[SPACES[1]]["records"] == 6 and found[SPACES[0]]["about"] == {"model": "tiny", "dtype": "float32"}
    assert run(root, "stats") == 0 and "used in the last hour 0%" in capsys.readouterr().out


def test_damaged_files_are_named_and_removed_only_when_asked(root: Path, capsys) -> None:
    first, second, *_ = sorted(root.rglob("*-[01]"))
    first.write_bytes(first.read_bytes()[:-5])
    second.write_bytes(b"")
    assert run(root, "verify") == 1
    shown = capsys.readouterr().out
    assert str(first) in shown and "10 records are as they were written, 2 are damaged" in shown
    assert first.exists()
    assert run(root, "verify", "--remove") == 0 and not first.exists() and not second.exists()
    assert run(root, "verify", "ab") == 0


def test_clear_leaves_no_byte_of_a_namespace_and_others_alone(root: Path, capsys) -> None:
    (root / SPACES[0] / "new-0123456789abcdef-1").write_bytes(b"what was being written")
    assert run(root, "clear", "ab") == 0
    assert [path.name for path in root.iterdir()] == [SPACES[1]] and len(contents(root)) == 7
    (root / SPACES[1] / "notes.txt").write_text("mine")
    assert run(root, "clear", "all") == 0
    assert list(contents(root)) == [f"{SPACES[1]}/notes.txt"] and "notes.txt: it stays" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("is_read_only", "says"),
    [(True, "2 records cannot be removed; engines find them again"),
     (False, "2 records cannot be removed; the next engine removes them, and finds none")],
)  # fmt: skip
def test_clear_names_what_it_cannot_remove_and_fails(
    root: Path, capsys, monkeypatch: pytest.MonkeyPatch, is_read_only: bool, says: str
) -> None:
    stuck, unlink = {*sorted((root / SPACES[0]).rglob("*-[01]"))[:2]}, Path.unlink

    def refuse(file: Path, *args: object, **options: object) -> None:
        if file in stuck or file.name == CLEARING:
            raise OSError(errno.EROFS, "Read-only file system", str(file))
        unlink(file, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        if is_read_only:
            patch.setattr(Path, "touch", refuse)
        assert run(root, "clear", SPACES[0]) == 1
    said = capsys.readouterr()
    assert "0 namespaces removed" in said.out and says in said.err
    assert all(f"{file} stays: Read-only file system" in said.err for file in stuck)
    assert {*(root / SPACES[0]).rglob("*-[01]")} == stuck
    assert run(root, "clear", SPACES[0]) == 0 and not (root / SPACES[0]).exists()


def test_what_cannot_be_done_says_why(root: Path, tmp_path: Path, capsys) -> None:
    for said, says in (
        (["clear", "0"], "no namespace begins so"),
        (["export", str(tmp_path / "no" / "out.kv")], "No such file or directory"),
        (["import", str(tmp_path / "missing.kv")], "No such file or directory"),
        (["warm", str(tmp_path / "missing.txt")], "No such file or directory"),
        (["stats", "http://127.0.0.1:9"], "is the server running?"),
    ):
        assert run(root, *said) == 1 and says in capsys.readouterr().err, said
    assert run(tmp_path / "elsewhere", "ls") == 1 and "expected that of kv_store.disk.path" in capsys.readouterr().err


def test_an_archive_goes_from_one_folder_to_another(root: Path, tmp_path: Path, capsys) -> None:
    out = str(tmp_path / "out.kv")
    assert run(root, "export", out, "cd") == 0 and "6 records" in capsys.readouterr().out
    assert run(tmp_path / "to", "import", out) == 0
    assert "6 records were added" in capsys.readouterr().out
    assert folder.chosen(tmp_path / "to", "") == [SPACES[1]]
    Path(out).write_bytes(Path(out).read_bytes()[:-100])
    assert run(tmp_path / "to", "import", out) == 1 and "what was before it is taken" in capsys.readouterr().err
