"""Results are written whole or not at all, and in JSON that every reader takes."""

import json
import math
import os

import pytest

from engine_lab.shared.output import check_folder, check_writable, write_json


def test_what_no_number_of_json_says_is_a_text(tmp_path):
    file = tmp_path / "result.json"
    write_json(str(file), {"rows": [{"kl": math.inf, "increase": math.nan, "top": 0.5, "n": None}]})

    def refused(constant):
        raise AssertionError(f"{constant} is not JSON")

    found = json.loads(file.read_text(), parse_constant=refused)
    assert found == {"rows": [{"kl": "inf", "increase": "nan", "top": 0.5, "n": None}]}


def test_a_result_that_fails_leaves_the_last_one_and_nothing_else(tmp_path, monkeypatch):
    file = tmp_path / "result.json"
    file.write_text("the last one")

    def failing(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="No space left"):
        write_json(str(file), {})
    assert file.read_text() == "the last one" and list(tmp_path.iterdir()) == [file]


def test_a_link_stays_a_link_and_permissions_stay(tmp_path):
    file, link = tmp_path / "result.json", tmp_path / "link"
    file.write_text("")
    file.chmod(0o640)
    link.symlink_to(file)
    write_json(str(link), {"a": 1})
    assert link.is_symlink() and json.loads(file.read_text()) == {"a": 1}
    assert file.stat().st_mode & 0o777 == 0o640


def test_trying_leaves_nothing_after(tmp_path):
    check_writable(str(tmp_path / "result.json"), [])
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_refused_with_its_flag_and_trying_leaves_nothing(tmp_path):
    check_folder(tmp_path / "a" / "b", "--out")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "b"):
        with pytest.raises(ValueError, match=r"--out .*file.*: expected a folder that can be written to"):
            check_folder(folder, "--out")
