"""Which stores go together, and with which engine."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest

from engine.assembly.assemble import assemble
from engine.assembly.bind import bind
from engine.assembly.errors import AssemblyError
from engine.ranks.messages import OpenMemory
from engine.startup import stores
from engine.startup.build import build_engine
from engine.startup.memory.fit import check_memory, plan_memory
from engine.startup.placing import placed
from engine.startup.segments import ServerMemory, of_all_ranks, opened
from engine.startup.stores import files_to_read, namespace_of

COMMON = ["model.path=bundled", "device=cpu", "threads=1", "model.max_len=64", "exporter=[]"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["kv_store=[disk]", "kv_store.disk.path={folder}"], r"disk has no memory.*kv_store=\[STORE,disk\]"),
        (
            [
                "kv_store=[host,disk]",
                "kv_store.disk.path={folder}",
                "parallelism.tp=2",
                "parallelism.nodes=2",
                "parallelism=join",
                "communicator=gloo",
            ],
            r"kv_store=\[host,disk\]: ranks on 2 machines \(parallelism\.nodes\) keep.*use kv_store=\[host\], or ranks",
        ),
        (["kv_store=[host]", "kv_allocator=paged"], "kv_store=host needs kv_allocator with prefix_cache"),
        (["kv_store=[host]", "kv_store.host.max_bytes=10"], r"kv_store\.host\.max_bytes=10"),
        (["kv_store=[hosts]"], "no such kv_store"),
        (
            ["kv_store=[host,peer]", "kv_store.peer.listen=192.0.2.1:29701", "kv_store.peer.token_file={token}"],
            r"^kv_store=peer: kv_store\.peer\.listen: this engine cannot listen there \(192\.0\.2\.1:29701: .*; exp",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: list[str], words: str, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t" * 32)
    own = [each.format(folder=tmp_path / "kv", token=token) for each in overrides]
    with pytest.raises((AssemblyError, ValueError), match=words):
        build_engine(assemble([*COMMON, *own]))


def test_a_check_refuses_stores_that_a_start_would_refuse(tmp_path: Path) -> None:
    with pytest.raises(AssemblyError, match="disk has no memory"):
        check_memory(assemble([*COMMON, "kv_store=[disk]", f"kv_store.disk.path={tmp_path / 'kv'}"]))


def test_all_ranks_together_plan_for_one_bound_on_memory() -> None:
    plan = assemble([*COMMON, "kv_store=[host]", "kv_store.host.max_bytes=16777217", "parallelism.tp=3"])
    bound = bind(plan)
    ranks = [plan_memory(plan, bound, free=1 << 34, own=own).estimate.stores for own in placed(plan, bound)]
    assert 16777217 <= sum(ranks) < 16777217 + 3


def test_keys_last_only_where_there_are_stores() -> None:
    for overrides, length in (([], 0), (["kv_store=[host]"], 64)):
        plan = assemble([*COMMON, *overrides])
        bound = bind(plan)
        assert len(namespace_of(plan, bound, files_to_read(plan, bound))) == length


class Device:
    """Ranks that open memory, or cannot."""

    def __init__(self, problems: dict[int, str]) -> None:
        self.problems = problems

    def open_memory(self, opening: OpenMemory) -> dict[int, str]:
        return self.problems


def test_memory_that_ranks_cannot_open_is_replaced_with_a_warning_that_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = assemble([*COMMON, "kv_store=[host]", "parallelism.tp=2"])
    (memory,), made = bind(plan).kv_stores, ServerMemory(plan).of(0)
    assert made is not None
    monkeypatch.setattr(stores, "EARLIER_S", 0.0)
    with warnings.catch_warnings(action="error"):
        assert stores._opened_by_all(plan, memory, Device({}), made, alone=True) is made
    with pytest.warns(UserWarning, match="kv_store=host: rank 1: no such file; each rank keeps its part"):
        assert stores._opened_by_all(plan, memory, Device({1: "no such file"}), made, alone=True) is None
    opening = of_all_ranks(made.files[0], 0.0)
    assert opening is not None
    earlier = opened(opening)
    with pytest.warns(UserWarning, match="kv_store=host: ranks of an earlier engine .* begins without its records"):
        assert stores._opened_by_all(plan, memory, Device({}), made, alone=True) != made
    os.close(earlier)
