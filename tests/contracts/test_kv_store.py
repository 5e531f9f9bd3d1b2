"""Stores are of two kinds, and the core tells them apart by what they can do."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.assembly.assemble import assemble
from engine.assembly.bind import bind
from engine.contracts.kv_store import MemoryStore, StagedStore


@pytest.mark.parametrize(("name", "is_memory"), [("host", True), ("disk", False), ("peer", False)])
def test_a_built_in_store_is_of_one_kind(name: str, is_memory: bool, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t" * 32)
    own = {"disk": f"path={tmp_path / 'kv'}", "peer": f"token_file={tmp_path / 'token'}"}
    options = [f"kv_store.{name}.{own[name]}"] if name in own else []
    (store,) = bind(assemble(["model.path=bundled", "device=cpu", f"kv_store=[{name}]", *options])).kv_stores
    assert (isinstance(store, MemoryStore), isinstance(store, StagedStore)) == (is_memory, not is_memory)
