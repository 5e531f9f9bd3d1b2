"""The cache: what is written is where attention reads it, whatever the format."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from engine.contracts.config import SlotConfig
from engine.contracts.drafter import DrafterKV
from engine.contracts.graph import KVSpec, Reach
from engine.kv.cache import KVCache
from engine.kv.groups import cache_groups
from engine.plugin_guard.calls import PluginError
from engine.testing.context import build_context
from engine_plugins.kv_format import int8 as formats
from engine_plugins.kv_format.fp8 import FP8Format
from engine_plugins.kv_format.native import NativeFormat

CONTEXT = build_context()
MODEL = CONTEXT.model
SPEC = KVSpec(MODEL.num_kv_heads, MODEL.head_dim)
SPECS = [SPEC] * 2
LAYERS = cache_groups(SPECS)


@dataclass
class Int8Format:
    """A format with scales, for the cache's own bookkeeping."""

    scale: Literal["none", "per_layer_head", "per_token_head"]
    lossless: bool = False

    def storage_dtype(self, compute_dtype: str) -> str:
        return "int8"

    def pack(self, x: Tensor, scale: Tensor | None) -> Tensor:
        assert scale is not None
        return (x / scale[..., None]).round().clamp(-127, 127).to(torch.int8)

    def unpack(self, x: Tensor, scale: Tensor | None, dtype: Any) -> Tensor:
        assert scale is not None
        return (x.float() * scale[..., None]).to(dtype)

    def load_tile(self) -> None:
        return None


def test_tokens_land_in_their_slots_and_nowhere_else() -> None:
    cache = KVCache(LAYERS, NativeFormat(SlotConfig(), CONTEXT), [4], 8, "float32", "cpu")
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    cache.write(0, torch.tensor([9, 31, 0]), k, v)
    layer = cache.layers[0]
    assert torch.equal(layer.k[1, 1], k[0]) and torch.equal(layer.k[3, 7], k[1]) and torch.equal(layer.v[0, 0], v[2])
    assert int((layer.k.flatten(0, 1).abs().sum((1, 2)) > 0).sum()) == 3
    assert layer.k_scale is None and layer.v_scale is None


def test_native_is_lossless() -> None:
    native = NativeFormat(SlotConfig(), CONTEXT)
    x = torch.randn(5, 2, 8).bfloat16()
    assert native.lossless and torch.equal(native.unpack(native.pack(x, None), None, torch.bfloat16), x)


@pytest.mark.parametrize("granularity", ["per_token_head", "per_layer_head"])
def test_scaled_formats_read_back_what_was_written(granularity: Any) -> None:
    kv_format = Int8Format(granularity)
    cache = KVCache(LAYERS, kv_format, [4], 8, "float32", "cpu")
    size = 1.0 if granularity == "per_token_head" else 30.0
    k, v = torch.randn(2, 2, 8) * size, torch.randn(2, 2, 8) * size
    cache.write(0, torch.tensor([5, 17]), k, v)
    keys, scale = cache.layers[0].k, cache.layers[0].k_scale
    assert scale is not None
    picked = scale.flatten(0, 1)[[5, 17]] if granularity == "per_token_head" else scale
    back = kv_format.unpack(keys.flatten(0, 1)[[5, 17]], picked, torch.float32)
    step = float(k.abs().max()) / 127 if granularity == "per_token_head" else 1.0
    assert float((back - k).abs().max()) <= 0.51 * step


@pytest.mark.parametrize(
    "kv_format", [NativeFormat(SlotConfig(), CONTEXT), Int8Format("per_token_head"), FP8Format(SlotConfig(), CONTEXT)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_copied_block_is_the_same_in_all_layers_and_no_other_block_changes(kv_format: Any, dtype: str) -> None:
    cache = KVCache(cache_groups(SPECS, DrafterKV((KVSpec(1, 16),) * 2)), kv_format, [6], 8, dtype, "cpu")
    for layer, held in cache.layers.items():
        k, v = (torch.randn(48, *held.k.shape[2:], dtype=getattr(torch, dtype)) for _ in "kv")
        cache.write(layer, torch.arange(48), k, v)

    def blocks(layer: Any) -> list[Tensor]:
        """Keys, values and scales of tokens."""
        stored = [t for t in (layer.k, layer.v, layer.k_scale, layer.v_scale) if t is not None and t.dim() > 1]
        return [t.float().clone() for t in stored]

    before = [blocks(layer) for layer in cache.layers.values()]
    cache.copy_block(0, 4, 1)
    cache.copy_block(0, 2, 4)
    order = [0, 4, 2, 3, 2, 5]
    for was, layer in zip(before, cache.layers.values(), strict=True):
        assert len(was) == (4 if kv_format.scale == "per_token_head" else 2)
        assert all(torch.equal(t[order], now) for t, now in zip(was, blocks(layer), strict=True))


@pytest.mark.parametrize("kv_format", [NativeFormat(SlotConfig(), CONTEXT), Int8Format("per_token_head")])
def test_block_bytes_times_blocks_is_what_the_cache_holds(kv_format: Any) -> None:
    mixed = cache_groups([SPEC, KVSpec(1, 16, Reach("window", 8)), KVSpec(4, 8), KVSpec(2, 8, Reach("window", 8))])
    cache = KVCache(mixed, kv_format, [6, 3], 16, "bfloat16", "cpu")
    full, window = KVCache.block_bytes(mixed, kv_format, 16, "bfloat16")
    assert cache.num_bytes == 6 * full + 3 * window


@pytest.mark.parametrize(("kind", "per_head"), [(FP8Format, 128), (formats.Int8Format, 132)])
def test_8_bit_formats_take_about_half_the_bytes_of_16_bits(kind: Any, per_head: int) -> None:
    layers = cache_groups([KVSpec(MODEL.num_kv_heads, 128)])
    native, narrow = NativeFormat(SlotConfig(), CONTEXT), kind(SlotConfig(), CONTEXT)
    (full,) = KVCache.block_bytes(layers, native, 16, "bfloat16")
    assert KVCache.block_bytes(layers, narrow, 16, "bfloat16") == (full * per_head // 256,)


def test_a_layer_has_the_scales_of_the_checkpoint_and_no_other_layer_has() -> None:
    cache = KVCache(LAYERS, FP8Format(SlotConfig(), CONTEXT), [4], 8, "float32", "cpu")
    heads = MODEL.num_kv_heads
    first, second = cache.layers.values()
    cache.set_scales(1, torch.tensor(0.5), torch.linspace(0.1, 0.2, heads))
    assert second.k_scale is not None and second.k_scale.tolist() == [0.5] * heads
    assert second.v_scale is not None and torch.equal(second.v_scale, torch.linspace(0.1, 0.2, heads))
    assert first.k_scale is not None and first.k_scale.tolist() == [1.0] * heads


@pytest.mark.parametrize("scale", [torch.ones(MODEL.num_kv_heads + 1), torch.tensor(0.0), torch.tensor(float("nan"))])
def test_scales_that_fit_no_head_are_named(scale: Tensor) -> None:
    cache = KVCache(LAYERS, FP8Format(SlotConfig(), CONTEXT), [4], 8, "float32", "cpu")
    with pytest.raises(ValueError, match=r"v_scale.* of layer 1"):
        cache.set_scales(1, torch.tensor(1.0), scale)


def test_an_unknown_storage_dtype_is_named() -> None:
    kv_format = Int8Format("per_token_head")
    kv_format.storage_dtype = lambda compute_dtype: "int9"  # type: ignore[method-assign]
    with pytest.raises(PluginError, match="'int9'"):
        KVCache(LAYERS, kv_format, [1], 8, "float32", "cpu")


def test_a_stage_without_a_layer_of_a_group_has_nothing_to_copy() -> None:
    window = KVSpec(MODEL.num_kv_heads, MODEL.head_dim, Reach("window", 8))
    stage = replace(cache_groups([SPEC, window]), caches=(SPEC,), group_of=(0,))
    cache = KVCache(stage, NativeFormat(SlotConfig(), CONTEXT), [4, 4], 8, "float32", "cpu")
    cache.copy_block(1, 3, 2)


def test_a_copied_block_of_a_group_changes_its_caches_alone() -> None:
    mixed = cache_groups([SPEC, KVSpec(MODEL.num_kv_heads, MODEL.head_dim, Reach("window", 8))])
    cache = KVCache(mixed, NativeFormat(SlotConfig(), CONTEXT), [4, 4], 8, "float32", "cpu")
    for layer in cache.layers.values():
        layer.k.copy_(torch.randn(layer.k.shape))
    full, window = (layer.k.clone() for layer in cache.layers.values())
    cache.copy_block(1, 3, 2)
    assert torch.equal(cache.layers[0].k, full)
    assert torch.equal(cache.layers[1].k, window[[0, 1, 3, 3]])
