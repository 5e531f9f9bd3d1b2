"""Leases whose blocks are filled from elsewhere: what an allocator may not answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.contracts.config import KVAllocatorConfig
from engine.contracts.kv_allocator import KVGroup, Lease, Prefix
from engine.kv.block_keys import BlockKeys
from engine.kv.checked_allocator import CheckedAllocator
from engine.plugin_guard.calls import PluginError
from engine.testing.context import build_context
from engine_plugins.kv_allocator.prefix_cache import PrefixCacheAllocator

BLOCK = 8
GROUPS = (KVGroup(0, (0,), "full", 64, 30), KVGroup(1, (1,), "window", 64, 30, 2 * BLOCK))
TOKENS = list(range(100))
KEYS = BlockKeys(("salt",), BLOCK).extend(TOKENS)
CONFIG, CONTEXT = KVAllocatorConfig(block_size=BLOCK), build_context(block_size=BLOCK)

Change = Callable[[Lease, Lease], None]


class Wrong(PrefixCacheAllocator):
    """Changes what it is about to answer."""

    change: Change
    held: Lease

    def open_filling(self, request_id: str, prefix: Prefix, max_tokens: int) -> Lease | None:
        lease = super().open_filling(request_id, prefix, max_tokens)
        assert lease is not None
        self.change(lease, self.held)
        return lease


def another_s_block(lease: Lease, held: Lease) -> None:
    lease.blocks[0][lease.to_fill[0][-1]] = held.blocks[0][0]


def a_passed_block(lease: Lease, held: Lease) -> None:
    lease.to_fill = (lease.to_fill[0], (0, *lease.to_fill[1]))


def no_block(lease: Lease, held: Lease) -> None:
    lease.blocks[1][-1] = 0


def fewer_tokens(lease: Lease, held: Lease) -> None:
    lease.num_cached -= BLOCK


def fewer_blocks(lease: Lease, held: Lease) -> None:
    lease.blocks[0].pop()


@pytest.mark.parametrize("change", [another_s_block, a_passed_block, no_block, fewer_tokens, fewer_blocks])
def test_a_block_that_may_not_be_filled_ends_the_engine_with_the_plugin_s_name(change: Change) -> None:
    inner = Wrong(CONFIG, CONTEXT)
    inner.start(GROUPS)
    checked = CheckedAllocator(inner, GROUPS, BLOCK)
    held = checked.open("holder", Prefix(), 4 * BLOCK)
    assert held is not None and checked.reserve(held, 4 * BLOCK)
    inner.change, inner.held = change, held
    with pytest.raises(PluginError, match=r"Wrong: open_filling\(\)"):
        checked.open_filling("filled", Prefix(KEYS, TOKENS, 6 * BLOCK), 10 * BLOCK)
