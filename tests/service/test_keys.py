"""Keys in a file, and what keeps tenants apart."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from engine.assembly.errors import AssemblyError
from engine.service import keys
from engine.service.keys import Caller, Keys, salt_for


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def entry(name: str, key: str | None = None, **more: Any) -> dict[str, Any]:
    return {"name": name, "sha256": digest(key or name), **more}


def written(folder: Path, entries: Any) -> str:
    path = folder / "keys.yaml"
    path.write_text(entries if isinstance(entries, str) else json.dumps(entries))
    return str(path)


def caller(tenant: str) -> Caller:
    return Caller("n", digest("k"), tenant)


def test_a_key_is_found_by_its_digest(tmp_path: Path) -> None:
    found = Keys(written(tmp_path, [entry("a", "sesame", tenant="t", admin=True), entry("b")]))
    one = found.find("sesame")
    assert one is not None and (one.name, one.of, one.admin) == ("a", "t", True)
    other = found.find("b")
    assert other is not None and (other.of, other.admin, other.max_sequences) == ("b", False, None)
    for wrong in ("", "a", digest("sesame"), "Sesame", "\udce9"):
        assert found.find(wrong) is None


def test_yaml_is_read_too(tmp_path: Path) -> None:
    assert Keys(written(tmp_path, f"- name: a\n  sha256: {digest('k')}\n  priority: 5\n")).find("k") is not None


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([], "has no list of keys"),
        ({"name": "a"}, "has no list of keys"),
        ("- [", "is no YAML"),
        ([{"name": "a"}], "key 1: Object missing required field `sha256`"),
        ([{"name": "a", "sha256": "x"}], "key 1: Expected `str` matching regex"),
        ([entry("a"), {**entry("b"), "name": "b b"}], "key 2: Expected `str` matching regex"),
        ([entry("a", key_="x")], "key 1: Object contains unknown field `key_`"),
        ([entry("a", max_sequences=0)], "key 1: Expected `int` >= 1"),
        ([entry("a"), entry("a", "other")], "two keys have the name a"),
        ([entry("a", "k"), entry("b", "k")], "two keys have the sha256"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, entries: Any, said: str) -> None:
    path = written(tmp_path, entries)
    with pytest.raises(AssemblyError) as refused:
        Keys(path)
    assert refused.value.problems[0].startswith(f"server.keys={path}: ") and said in refused.value.problems[0]


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(AssemblyError, match=r"server\.keys=.*nowhere: No such file"):
        Keys(str(tmp_path / "nowhere"))


def test_a_change_is_taken_and_a_broken_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "LOOKED_AT_S", -1.0)
    found = Keys(written(tmp_path, [entry("a")]))
    written(tmp_path, [entry("a"), entry("bb")])
    assert found.find("bb") is not None
    written(tmp_path, "- [")
    assert found.find("bb") is not None
    written(tmp_path, "[" * 5000)
    assert found.find("bb") is not None
    (tmp_path / "keys.yaml").unlink()
    with capture_logs() as said:
        assert found.find("bb") is not None and found.find("bb") is not None
    assert [line["error"] for line in said] == ["No such file or directory"], "what is known is not said again"
    written(tmp_path, [entry("bb", max_sequences=3)])
    assert found.find("a") is None, "a key that was taken out is nobody's"


@given(
    st.text(),
    st.text(),
    st.from_regex(r"[a-z0-9._-]{1,8}", fullmatch=True),
    st.from_regex(r"[a-z0-9._-]{1,8}", fullmatch=True),
)
def test_tenants_never_share_a_salt(one: str, other: str, tenant: str, another: str) -> None:
    same = (tenant, one) == (another, other)
    assert (salt_for(caller(tenant), one) == salt_for(caller(another), other)) is same
    assert salt_for(caller(tenant), one) not in (one, other)


def test_a_salt_says_nothing_and_fits_into_a_request() -> None:
    salt = salt_for(caller("acme"), "x" * 256)
    assert len(salt) <= 256 and "acme" not in salt and salt_for(caller("acme"), None) == salt_for(caller("acme"), "")
    assert salt_for(None, None) == "" and salt_for(None, "s") == "s"
