"""Records hold all bytes of a block, and put them back, whatever a cache consists of."""

from __future__ import annotations

import mmap
import random
from contextlib import nullcontext

import pytest
import torch

from engine.contracts.config import SlotConfig
from engine.contracts.graph import Cached, KVSpec, Reach, StateSpec
from engine.contracts.kv_format import KVFormat
from engine.kernels.storage import as_bits
from engine.kv.cache import KVCache
from engine.kv.groups import cache_groups
from engine.kv.records import Records
from engine.testing.context import build_context
from engine_plugins.kv_format.fp8 import FP8Format
from engine_plugins.kv_format.int8 import Int8Format
from engine_plugins.kv_format.native import NativeFormat

BLOCKS, BLOCK = 90, 8
CACHES: tuple[Cached, ...] = (
    KVSpec(2, 16),
    KVSpec(1, 5, Reach("window", 16)),
    KVSpec(3, 7),
    KVSpec(1, 24, value_dim=16),
    StateSpec(10, 30),
    KVSpec(2, 8, Reach("chunked", 16)),
    StateSpec(6, 0),
)
"""Odd sizes among them, and latent keys. A state of no numbers, too."""


def cache_of(kv_format: KVFormat, dtype: str) -> KVCache:
    """Full of random bytes."""
    groups = cache_groups(CACHES)
    kv = KVCache(groups, kv_format, [BLOCKS + group for group in range(groups.num_groups)], BLOCK, dtype, "cpu")
    for group in range(kv.num_groups):
        for tensor in kv.block_tensors(group):
            own = as_bits(tensor).view(torch.uint8)
            own.copy_(torch.randint(0, 256, own.shape, dtype=torch.uint8))
    return kv


def content(kv: KVCache, group: int) -> list[torch.Tensor]:
    return [as_bits(tensor).flatten(1).view(torch.uint8).clone() for tensor in kv.block_tensors(group)]


@pytest.mark.parametrize("kv_format", [NativeFormat, Int8Format, FP8Format])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_that_come_back_are_those_that_went(kv_format: type[KVFormat], dtype: str) -> None:
    kv = cache_of(kv_format(SlotConfig(), build_context()), dtype)
    records = Records(kv)
    memory = [mmap.mmap(-1, size * 100) for size in records.num_bytes]
    records.attach([memoryview(each) for each in memory])
    draw = random.Random(1)
    for group in range(kv.num_groups):
        blocks, slots = draw.sample(range(1, BLOCKS), 80), draw.sample(range(100), 80)
        before = content(kv, group)
        assert sum(tensor.shape[1] for tensor in before) == records.num_bytes[group]
        records.gather(group, blocks, slots)
        others = draw.sample(range(1, BLOCKS), 80)
        records.scatter(group, slots, others)
        kept = sorted({*range(BLOCKS + group)} - {*others})
        for was, now in zip(before, content(kv, group), strict=True):
            assert torch.equal(now[others], was[blocks]) and torch.equal(now[kept], was[kept])


class NoStream:
    """Stands in for a GPU's: all is done at once."""

    def wait_stream(self, other: object) -> None: ...

    def record_event(self) -> None: ...


def test_rows_that_a_gpu_copies_one_by_one_are_the_same_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    kv = cache_of(Int8Format(SlotConfig(), build_context()), "float32")
    one, other = Records(kv), Records(kv)
    memory = [[bytearray(size * BLOCKS) for size in records.num_bytes] for records in (one, other)]
    for records, its in zip((one, other), memory, strict=True):
        records.attach([memoryview(each) for each in its])
    other._aside = NoStream()  # type: ignore[assignment]
    blocks, slots = random.Random(1).sample(range(1, BLOCKS), 70), random.Random(2).sample(range(BLOCKS), 70)
    for group in range(kv.num_groups):
        before = content(kv, group)
        for records in (one, other):
            records.gather(group, blocks, slots).wait()
        assert memory[0][group] == memory[1][group]
        for tensor in kv.block_tensors(group):
            tensor.zero_()
        other.scatter(group, slots, blocks)
        for was, now in zip(before, content(kv, group), strict=True):
            assert torch.equal(now[blocks], was[blocks])


def test_a_record_has_all_that_a_block_takes() -> None:
    kv_format = Int8Format(SlotConfig(), build_context())
    kv = cache_of(kv_format, "float32")
    assert Records(kv).num_bytes == KVCache.block_bytes(cache_groups(CACHES), kv_format, BLOCK, "float32")
