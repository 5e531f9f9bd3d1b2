"""Unfinished files end with their process, and nobody else's are touched."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from engine.native import scratch
from engine.native.scratch import replacing, scratch_folder, sweep

HOLDER = """
import sys, time
from pathlib import Path
from engine.native.scratch import scratch_folder
with scratch_folder(Path(sys.argv[1])):
    print("made", flush=True)
    time.sleep(60)
"""


def holder(parent: Path) -> subprocess.Popen[str]:
    """Another process with a scratch folder in ``parent``."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(parent)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None and process.stdout.readline() == "made\n"
    return process


def test_a_folder_is_removed_with_what_is_in_it(tmp_path: Path) -> None:
    with pytest.raises(KeyError), scratch_folder(tmp_path) as folder:
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=folder))
        (made,) = tmp_path.iterdir()
        assert made.stat().st_mode & 0o777 == 0o700 and (made / "file").exists()
        raise KeyError
    assert [*tmp_path.iterdir()] == []


def test_the_folder_of_a_killed_process_is_swept_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    process = holder(tmp_path)
    try:
        sweep(tmp_path)
        assert len([*tmp_path.iterdir()]) == 1
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    (left,) = tmp_path.iterdir()
    (left / "half a file").touch()
    sweep(tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_a_process_killed_before_it_has_a_lock_leaves_nothing_either(tmp_path: Path) -> None:
    (tmp_path / "engine-scratch-abcdefgh").mkdir()
    sweep(tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_what_looks_like_a_scratch_folder_and_is_none_stays(tmp_path: Path) -> None:
    notes, link = (tmp_path / f"engine-scratch-{letter * 8}" for letter in "ab")
    notes.mkdir()
    (notes / "notes.txt").touch()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lock").touch()
    link.symlink_to(elsewhere)
    sweep(tmp_path)
    assert (notes / "notes.txt").exists() and link.is_symlink() and (elsewhere / "lock").exists()


def test_a_folder_that_is_swept_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, made = tempfile.mkdtemp, []

    def swept_at_once(**options: str) -> str:
        made.append(make(**options))
        if len(made) == 1:
            sweep(tmp_path)
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", swept_at_once)
    with scratch_folder(tmp_path):
        assert [str(path) for path in tmp_path.iterdir()] == made[1:] and len(made) == 2


def test_a_folder_that_was_put_in_its_place_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, other = tempfile.mkdtemp, tmp_path / "other"
    other.mkdir()
    (other / "file").touch()

    def exchanged(**options: str) -> str:
        path = Path(make(**options))
        if other.exists():
            path.rmdir()
            other.rename(path)
        return str(path)

    monkeypatch.setattr(tempfile, "mkdtemp", exchanged)
    with scratch_folder(tmp_path) as folder:
        assert os.listdir(folder) == ["lock"]
    (kept,) = tmp_path.iterdir()
    assert (kept / "file").exists()


def test_what_is_written_goes_to_the_folder_that_was_made(tmp_path: Path) -> None:
    with scratch_folder(tmp_path) as folder:
        (made,) = tmp_path.iterdir()
        made.rename(tmp_path / "aside")
        made.mkdir()
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=folder))
        assert (tmp_path / "aside" / "file").exists() and [*made.iterdir()] == []
    shutil.rmtree(tmp_path / "aside")


def test_without_locks_folders_are_used_and_never_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(scratch.fcntl, "flock", no_locks)
    with scratch_folder(tmp_path):
        sweep(tmp_path)
        assert len([*tmp_path.iterdir()]) == 1
    assert [*tmp_path.iterdir()] == []


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"old")
    with pytest.raises(KeyError), replacing(target) as new:
        new.write(b"half")
        raise KeyError
    assert target.read_bytes() == b"old" and [*tmp_path.iterdir()] == [target]
    with replacing(target) as new:
        new.write(b"new")
    assert target.read_bytes() == b"new" and target.stat().st_mode & 0o777 == 0o600
    assert [*tmp_path.iterdir()] == [target]
