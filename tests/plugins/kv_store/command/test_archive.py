"""Records carried in a file: all of them arrive, and a hostile file brings nothing but records that are whole."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import pytest

from engine_plugins.kv_store.command import archive, folder
from engine_plugins.kv_store.command.folder import FolderError
from engine_plugins.kv_store.record_files import ABOUT, About, file_of, write_about, write_file
from engine_plugins.kv_store.record_header import header_of

SPACES = ["ab" * 32, "cd" * 32]


def records(root: Path, name: str, count: int, size: int = 3000) -> list[Path]:
    """Written as a store does, a second apart."""
    found, draw = [], random.Random(name)
    (root / name).mkdir(mode=0o700, parents=True)
    write_about(root / name, About("tiny", "float32"), root / name / "new-0")
    for number in range(count):
        each, record = (number % 2, draw.randbytes(32)), memoryview(draw.randbytes(size))
        file = file_of(root / name, each)
        file.parent.mkdir(mode=0o700, exist_ok=True)
        write_file(file, header_of(each, record), record)
        os.utime(file, (1e9 + number, 1e9 + number))
        found.append(file)
    return found


def contents(root: Path) -> dict[str, bytes]:
    return {file.relative_to(root).as_posix(): file.read_bytes() for file in root.rglob("*") if file.is_file()}


@pytest.fixture
def carried(tmp_path: Path) -> Path:
    for name in SPACES:
        records(tmp_path / "from", name, 8)
    assert archive.export(tmp_path / "from", SPACES, tmp_path / "all.kv") == (16, 0)
    return tmp_path / "all.kv"


def test_everything_arrives_and_is_for_this_user_alone(carried: Path, tmp_path: Path) -> None:
    to = tmp_path / "to"
    assert archive.take(to, carried, 1 << 20).added == 16
    assert contents(to) == contents(tmp_path / "from")
    assert carried.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in (to, *to.rglob("*")))
    again = archive.take(to, carried, 1 << 20)
    assert (again.added, again.there, again.problem) == (0, 16, "")
    with pytest.raises(FolderError, match="exists; name another file"):
        archive.export(to, SPACES, carried)


def test_what_does_not_fit_is_what_was_used_least_and_nothing_makes_way(carried: Path, tmp_path: Path) -> None:
    to, room = tmp_path / "to", 6 * 4096
    mine = records(to, "ef" * 32, 1)
    taken = archive.take(to, carried, room + 3 * 4096)
    assert taken.added and taken.no_room == 16 - taken.added and mine[0].exists()
    sizes = [file.stat().st_blocks * 512 for file in to.rglob("*-[01]")]
    assert sum(sizes) <= room + 3 * 4096
    last = sorted((tmp_path / "from").rglob("*-[01]"), key=lambda file: file.stat().st_mtime)[-2:]
    assert all((to / file.relative_to(tmp_path / "from")).exists() for file in last)


def test_damaged_records_are_not_exported(tmp_path: Path) -> None:
    files = records(tmp_path / "from", SPACES[0], 4)
    files[1].write_bytes(files[1].read_bytes()[:-1])
    assert archive.export(tmp_path / "from", SPACES[:1], tmp_path / "out.kv") == (3, 1)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda data: b"", "no archive of format"),
        (lambda data: b"PK\3\4" + data[4:], "no archive of format"),
        (lambda data: data[:-1], "before its last entry"),
        (lambda data: data[:3000], "within the entry"),
        (lambda data: data[:48] + b"../../" + data[54:], "no entry at byte 16"),
        (lambda data: data[:60] + struct.pack("<Q", 1 << 40) + data[68:], "more than any record"),
    ],
)
def test_a_file_that_is_no_archive_says_why(carried: Path, tmp_path: Path, spoil, says: str) -> None:
    carried.write_bytes(spoil(carried.read_bytes()))
    assert says in archive.take(tmp_path / "to", carried, 1 << 20).problem


def test_a_hostile_archive_brings_nothing_but_whole_records_in_their_places(carried: Path, tmp_path: Path) -> None:
    """Bytes changed, lost and doubled at random."""
    data, outside = carried.read_bytes(), set(tmp_path.rglob("*"))
    for seed in range(24):
        draw, spoiled = random.Random(seed), bytearray(data)
        for _ in range(draw.randrange(1, 6)):
            at = draw.randrange(len(spoiled))
            match draw.randrange(3):
                case 0:
                    spoiled[at] ^= 1 << draw.randrange(8)
                case 1:
                    del spoiled[at : at + draw.randrange(1, 5000)]
                case 2:
                    spoiled[at:at] = spoiled[at : at + draw.randrange(1, 5000)]
        carried.write_bytes(spoiled)
        to = tmp_path / "to"
        taken = archive.take(to, carried, 64 << 10)
        found = [problem for _, problem in folder.damaged(to, folder.chosen(to, "all"))]
        assert found == [""] * taken.added, seed
        assert sum(status.st_blocks * 512 for _, status in archive.record_files(to)) <= 64 << 10
        for name in folder.chosen(to, "all"):
            assert folder.clear(to, name) == folder.Left(), seed
        to.rmdir()
        assert set(tmp_path.rglob("*")) == outside, seed


def test_a_link_in_the_way_is_not_followed(carried: Path, tmp_path: Path) -> None:
    (tmp_path / "to").mkdir(mode=0o700)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "to" / SPACES[0]).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FolderError, match="is a link"):
        archive.take(tmp_path / "to", carried, 1 << 20)
    assert [*(tmp_path / "elsewhere").iterdir()] == []


def test_what_an_archive_says_of_a_model_cannot_steer_a_terminal(tmp_path: Path) -> None:
    records(tmp_path / "from", SPACES[0], 1)
    (tmp_path / "from" / SPACES[0] / ABOUT).write_bytes(b'{"model": "\\u001b[2Jevil", "dtype": 7}')
    assert folder.read_about(tmp_path / "from" / SPACES[0]) == About()
    (tmp_path / "from" / SPACES[0] / ABOUT).write_bytes(b'{"x":' + b"[" * 4000)
    assert folder.read_about(tmp_path / "from" / SPACES[0]) == About()
    (tmp_path / "from" / SPACES[0] / ABOUT).write_bytes(b'{"model": "\\u001b[2Jevil"}')
    archive.export(tmp_path / "from", SPACES[:1], tmp_path / "out.kv")
    archive.take(tmp_path / "to", tmp_path / "out.kv", 1 << 20)
    assert folder.read_about(tmp_path / "to" / SPACES[0]).model == "?[2Jevil"
