"""A folder is used only if nobody but this user and root can change what lies there."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.native import folder as folders
from engine.native.folder import exposed, open_own, unusable

USER = os.geteuid()


def test_what_is_missing_is_made_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert unusable(tmp_path / "a" / "b") is None
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b")] == [0o700, 0o700]


@pytest.mark.parametrize("bits", [0o770, 0o707, 0o1777])
def test_others_may_not_write_to_the_folder(bits: int, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(bits)
    assert f"mode {bits:o}): chmod go-w {folder}" in str(unusable(folder))


def test_nothing_is_made_where_others_can_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o757)
    assert f"others can write to {tmp_path} (mode 757)" in str(unusable(tmp_path / "a" / "b"))
    assert [*tmp_path.iterdir()] == []


def test_a_parent_with_the_sticky_bit_is_no_danger(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    assert unusable(tmp_path / "a") is None


def test_every_link_on_the_way_is_followed_and_where_it_lies_is_checked(tmp_path: Path) -> None:
    for name in ("real", "safe", "of_all"):
        (tmp_path / name).mkdir()
    (tmp_path / "safe" / "link").symlink_to("../real/./../real")
    assert unusable(tmp_path / "safe" / "link" / "a") is None and (tmp_path / "real" / "a").is_dir()
    (tmp_path / "of_all" / "link").symlink_to(tmp_path / "safe")
    (tmp_path / "of_all").chmod(0o777)
    (tmp_path / "entry").symlink_to(tmp_path / "of_all" / "link")
    assert f"others can write to {tmp_path / 'of_all'} " in str(unusable(tmp_path / "entry" / "b"))


def test_what_leads_nowhere_is_told(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    assert "Too many levels of symbolic links" in str(unusable(tmp_path / "loop"))
    for path in ("file", "file/inner"):
        assert f"{tmp_path / 'file'} is no folder" in str(unusable(tmp_path / path))
    assert unusable(Path("relative")) == "relative is not an absolute path"


def test_folders_and_files_of_another_user_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: USER + 1)
    assert f"belongs to user {USER}, expected " in str(unusable(tmp_path))
    with pytest.raises(PermissionError, match=f"{file} belongs to user {USER}, expected {USER + 1}"):
        open_own(file)


def test_root_trusts_no_other_user(monkeypatch: pytest.MonkeyPatch) -> None:
    status = SimpleNamespace(st_uid=1000, st_mode=0o40755)
    monkeypatch.setattr(folders, "_way", lambda _: iter([(Path("/home/user"), status)]))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert exposed(Path("/home/user")) == "/home/user belongs to user 1000, expected 0"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert exposed(Path("/home/user")) is None


@pytest.mark.parametrize(
    ("euid", "name", "members", "others", "is_private"),
    [
        (1000, "ann", [], [], True),
        (1000, "ann", ["ann"], [], True),
        (1000, "ann", ["bob"], [], False),
        (1000, "ann", [], [SimpleNamespace(pw_name="bob", pw_gid=1000)], False),
        (1000, "staff", [], [], False),
        (0, "ann", [], [], False),
    ],
)
def test_a_parent_may_be_writable_for_a_group_of_this_user_alone(
    euid: int, name: str, members: list[str], others: list[object], is_private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann = SimpleNamespace(pw_name="ann", pw_gid=1000)
    monkeypatch.setattr(os, "geteuid", lambda: euid)
    monkeypatch.setattr(folders.pwd, "getpwuid", lambda _: ann)
    monkeypatch.setattr(folders.pwd, "getpwall", lambda: [ann, *others])
    monkeypatch.setattr(folders.grp, "getgrgid", lambda _: SimpleNamespace(gr_name=name, gr_mem=members))
    status = SimpleNamespace(st_uid=euid, st_gid=1000, st_mode=0o40775)
    monkeypatch.setattr(folders, "_way", lambda _: iter([(Path("/home/ann/.cache"), status)]))
    assert (exposed(Path("/home/ann/.cache")) is None) == is_private
