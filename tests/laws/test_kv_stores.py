"""Keys and values that left the pool and came back from a store: tokens are those of an engine that computed them."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.contracts.events import PrefixCacheEvent
from engine.contracts.request import EngineRequest
from engine.loop.core import EngineCore

from .drafted import Answer, answers
from .kv_models import DRAFTERS, FAMILIES, LENGTHS, OUTPUT, References, start
from .kv_models import references as references

HOST = ("kv_allocator=prefix_cache", "kv_store=[host]", "kv_store.host.max_bytes=67108864", "scheduler.max_requests=8")


def empty_pool(core: EngineCore) -> None:
    """Forget what is in blocks; records stay."""
    core._pool.allocator.reset_cache()


def loaded_by(core: EngineCore, requests: list[EngineRequest]) -> tuple[list[Answer], dict[str, int]]:
    """Answers, and how many tokens of each request came from records."""
    loaded: dict[str, int] = {}
    emit = core._planner._emit

    def watch(event: object) -> None:
        if isinstance(event, PrefixCacheEvent):
            loaded[event.request_id] = event.loaded
        emit(event)

    core._planner._emit = watch
    found = answers(core, requests, 6)
    core._planner._emit = emit
    return found, loaded


@pytest.mark.parametrize("kv_format", ["native", "int8"])
@pytest.mark.parametrize("name", FAMILIES)
def test_next_turns_load_what_the_pool_has_lost(references: References, name: str, kv_format: str) -> None:
    reference = references(name)
    lossy = f"kv_format={kv_format}"
    computed, core = start(reference, *HOST[:1], lossy).core, start(reference, *HOST, lossy).core
    expected = [answers(computed, make("a"), 6) for make in (reference.requests, reference.turns)]
    answers(core, reference.requests("first"), 6)
    empty_pool(core)
    found, loaded = loaded_by(core, reference.turns("then"))
    assert [answer.tokens for answer in found] == [answer.tokens for answer in expected[1]]
    if kv_format == "native":
        assert tuple(answer.tokens for answer in found) == tuple(tokens[-10:] for tokens in reference.tokens)
    whole = [(length + OUTPUT - 11) // 8 * 8 for length in LENGTHS]
    assert [loaded[f"then{i}"] for i in range(len(LENGTHS))] == whole
    core._pool.tiers.poll()
    core._pool.tiers._memory.store.check()
    core.check_idle()
    core.close()
    computed.close()


@pytest.mark.parametrize("name", FAMILIES)
def test_another_engine_reads_them_from_the_disk(references: References, name: str, tmp_path: Path) -> None:
    reference = references(name)
    disk = (*HOST, "kv_store=[host,disk]", f"kv_store.disk.path={tmp_path}", "kv_store.disk.max_bytes=67108864")
    first = start(reference, *disk).core
    answers(first, reference.requests("first"), 6)
    first.close()
    again = start(reference, *disk).core
    found, loaded = loaded_by(again, reference.turns("then"))
    assert tuple(answer.tokens for answer in found) == tuple(tokens[-10:] for tokens in reference.tokens)
    whole = [(length + OUTPUT - 11) // 8 * 8 for length in LENGTHS]
    assert [loaded[f"then{i}"] for i in range(len(LENGTHS))] == [upto * (upto >= 32) for upto in whole]
    again.close()
    again._pool.tiers._memory.store.check()


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafters_find_their_own_keys_in_records(references: References, drafter: str) -> None:
    reference = references("qwen2")
    chosen = [override.format(path=reference.path) for override in DRAFTERS[drafter]]
    core = start(reference, *HOST, *chosen).core
    first = answers(core, reference.requests("first"), 6)
    empty_pool(core)
    found, loaded = loaded_by(core, reference.requests("again"))
    assert [answer.tokens for answer in found] == [answer.tokens for answer in first]
    assert sum(loaded.values()) > 0
    accepted = [[answer.timings.accepted_tokens for answer in some] for some in (first, found)]
    assert sum(accepted[1]) >= 0.9 * sum(accepted[0])
    core.close()
