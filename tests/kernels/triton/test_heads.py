"""Rotation, head norm and cache write: one kernel with the projection, or one after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contracts.attention_kernel import LayerCache
from engine.contracts.config import SlotConfig
from engine.contracts.graph import KVSpec
from engine.contracts.quantizer import TileLoader
from engine.kernels.torch.norms import rms_norm
from engine.kernels.torch.rope import rotate
from engine.kernels.triton.launch import HeadShape, HeadWriter, Launch, NormWeight, SkinnyLinear
from engine.kernels.triton.weights import load_plain
from engine.kv.cache import KVCache
from engine.kv.groups import cache_groups
from engine.testing.context import build_context
from engine_plugins.kv_format import int8 as formats
from engine_plugins.kv_format.fp8 import FP8Format
from engine_plugins.kv_format.native import NativeFormat

SHAPES = [
    HeadShape(2, 1, 64, 64), HeadShape(3, 1, 80, 32), HeadShape(2, 2, 96, 96), HeadShape(4, 2, 128, 64),
    HeadShape(1, 1, 256, 256), HeadShape(2, 1, 16, 0), HeadShape(2, 1, 20, 20),
]  # fmt: skip
TWO_KV_HEADS = HeadShape(2, 2, 32, 16)
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}
NUM_BLOCKS, BLOCK_SIZE, IN_FEATURES = 8, 4, 72


class Int8Format(formats.Int8Format):
    """int8 with either kind of scales."""

    def __init__(self, scale: Literal["per_layer_head", "per_token_head"]) -> None:
        self.scale = scale


class Float8Format(FP8Format):
    """e4m3 with either kind of scales."""

    def __init__(self, scale: Literal["per_layer_head", "per_token_head"]) -> None:
        self.scale = scale


NATIVE = NativeFormat(SlotConfig(), build_context())


@dataclass
class Case:
    """Tokens of a layer, the float32 q, k and v they should have, and two caches full of NaN (or of 99)."""

    heads: HeadShape
    x: Tensor
    weight: Tensor
    bias: Tensor
    tables: tuple[Tensor, Tensor] | None
    slots: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    norm: NormWeight
    head_norms: tuple[NormWeight, NormWeight] | None
    caches: tuple[KVCache, KVCache]

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    def linear(self) -> SkinnyLinear:
        loader = TileLoader(load_plain, self.weight, bias=self.bias)
        return SkinnyLinear(Launch.on(str(self.x.device)), loader, IN_FEATURES, self.weight.shape[0], self.norm)

    def target(self) -> tuple[Tensor, LayerCache]:
        """The slots, and the cache to fill."""
        return self.slots, self.caches[0].layers[0]

    def check(self, q: Tensor) -> None:
        tolerance = TOLERANCE[str(self.dtype).removeprefix("torch.")]
        largest = max(1.0, float(self.q.abs().max()), float(self.k.abs().max()))
        assert q.shape == self.q.shape and float((q.float() - self.q).abs().max()) <= tolerance * largest
        self.caches[1].write(0, self.slots, self.k.to(self.dtype), self.v.to(self.dtype))
        got, want = (cache.layers[0] for cache in self.caches)
        for a, b in ((got.k, want.k), (got.v, want.v)):
            a, b = a.flatten(0, 1), b.flatten(0, 1)
            unused = torch.ones(len(a), dtype=torch.bool)
            unused[self.slots.cpu()] = False
            assert torch.equal(a[unused].nan_to_num(7.0), b[unused].nan_to_num(7.0)), "an unused slot was written"
            close = 1.0 if a.dtype == torch.int8 else tolerance * largest
            assert float((a[self.slots].float() - b[self.slots].float()).abs().max()) <= close
        for a, b in ((got.k_scale, want.k_scale), (got.v_scale, want.v_scale)):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert torch.allclose(a, b, rtol=tolerance, atol=1e-6)


def make(
    device: str, heads: HeadShape, num_tokens: int, dtype: str = "float32", kv_format: Any = NATIVE, *,
    head_norm: bool = False,
) -> Case:  # fmt: skip
    generator = torch.Generator().manual_seed(num_tokens)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, getattr(torch, dtype))

    total = heads.num_heads + 2 * heads.num_kv_heads
    x, bias = random(num_tokens, IN_FEATURES), random(total * heads.head_dim)
    weight = random(total * heads.head_dim, IN_FEATURES) * IN_FEATURES**-0.5
    norm = NormWeight(1.0 + 0.2 * random(IN_FEATURES).float(), 1e-5)
    dims = 1.0 + 0.2 * random(2, heads.head_dim).float()
    head_norms = (NormWeight(dims[0], 1e-6), NormWeight(dims[1], 1e-5)) if head_norm else None
    qkv = F.linear(rms_norm(x.float(), norm.weight, norm.eps), weight.float(), bias.float())
    q, k, v = qkv.view(num_tokens, total, -1).split([heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], 1)
    if head_norms is not None:
        q, k = (rms_norm(part, n.weight, n.eps) for part, n in zip((q, k), head_norms, strict=True))
    tables = None
    if heads.rotary_dim:
        angles = torch.rand(num_tokens, 1, heads.rotary_dim // 2, generator=generator).to(device) * 6.0
        tables = (angles.cos(), angles.sin())
        q, k = rotate(q, *tables), rotate(k, *tables)
    groups = cache_groups([KVSpec(heads.num_kv_heads, heads.head_dim)])
    num_blocks = max(NUM_BLOCKS, -(-num_tokens // BLOCK_SIZE) + 1)
    caches = tuple(KVCache(groups, kv_format, [num_blocks], BLOCK_SIZE, dtype, device) for _ in range(2))
    for cache in caches:
        layer = cache.layers[0]
        for tensor in (layer.k, layer.v):
            tensor.fill_(float("nan") if tensor.is_floating_point() else 99)
        if kv_format.scale == "per_layer_head":
            for scale in (layer.k_scale, layer.v_scale):
                assert scale is not None
                scale.copy_(torch.linspace(0.02, 0.04, heads.num_kv_heads))
    slots = torch.randperm(num_blocks * BLOCK_SIZE, generator=generator)[:num_tokens].to(device)
    return Case(heads, x, weight, bias, tables, slots, q, k, v, norm, head_norms, (caches[0], caches[1]))


def written(case: Case) -> Tensor:
    """The queries, by way of a plain product and the second kernel."""
    q_norm, k_norm = case.head_norms or (None, None)
    writer = HeadWriter(Launch.on(str(case.x.device)), case.heads, q_norm, k_norm)
    few = case.x.shape[0] <= 16
    normed = rms_norm(case.x, case.norm.weight, case.norm.eps)
    qkv = case.linear().store(case.x) if few else F.linear(normed, case.weight, case.bias)
    return writer(qkv, case.tables, *case.target())


@pytest.mark.parametrize(
    ("num_tokens", "heads"), [*((1, heads) for heads in SHAPES), *((16, heads) for heads in SHAPES[1::2])], ids=str
)
def test_a_program_rotates_and_stores_the_pairs_it_computed(device: str, heads: HeadShape, num_tokens: int) -> None:
    case = make(device, heads, num_tokens)
    case.check(case.linear().rope_write(case.x, heads, case.tables, *case.target()))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_projection_and_rotation_round_once(device: str, num_tokens: int, dtype: str) -> None:
    case = make(device, SHAPES[1], num_tokens, dtype)
    case.check(case.linear().rope_write(case.x, case.heads, case.tables, *case.target()))


@pytest.mark.parametrize(
    ("num_tokens", "head_norm", "heads"),
    [
        *((1, True, heads) for heads in SHAPES),
        *((2, False, heads) for heads in SHAPES[1::2]),
        *((17, True, heads) for heads in SHAPES[2::2]),
    ],
    ids=str,
)
def test_the_second_kernel_norms_heads_rotates_and_stores(
    device: str, heads: HeadShape, num_tokens: int, head_norm: bool
) -> None:
    case = make(device, heads, num_tokens, head_norm=head_norm)
    case.check(written(case))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_second_kernel_works_in_every_dtype(device: str, dtype: str) -> None:
    case = make(device, SHAPES[2], 18, dtype, head_norm=True)
    case.check(written(case))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_a_format_with_scales_per_layer_is_packed_by_the_projection(device: str, num_tokens: int, dtype: str) -> None:
    kv_format = Int8Format("per_layer_head")
    case = make(device, TWO_KV_HEADS, num_tokens, dtype, kv_format)
    case.check(case.linear().rope_write(case.x, case.heads, case.tables, *case.target()))


@pytest.mark.parametrize(
    ("num_tokens", "dtype", "scale"),
    [
        (1, "float32", "per_layer_head"), (1, "bfloat16", "per_token_head"),
        (20, "float32", "per_token_head"), (20, "bfloat16", "per_layer_head"),
    ],
)  # fmt: skip
def test_the_second_kernel_packs_and_finds_scales_of_whole_heads(
    device: str, num_tokens: int, dtype: str, scale: Any
) -> None:
    kv_format = Int8Format(scale)
    case = make(device, SHAPES[1], num_tokens, dtype, kv_format, head_norm=True)
    case.check(written(case))


@pytest.mark.parametrize("second_kernel", [False, True])
def test_a_negative_slot_is_not_written(device: str, second_kernel: bool) -> None:
    case = make(device, SHAPES[0], 3)
    case.slots[1] = -1
    if second_kernel:
        written(case)
    else:
        case.linear().rope_write(case.x, case.heads, case.tables, *case.target())
    layer = case.caches[0].layers[0]
    for tensor in (layer.k, layer.v):
        assert int(tensor.flatten(0, 1).isfinite().all(-1).all(-1).sum()) == 2


def test_a_poisoned_padding_row_reaches_no_other_row(device: str) -> None:
    heads = TWO_KV_HEADS
    case = make(device, heads, 4)
    case.x[3] = float("nan")
    q = case.linear().rope_write(case.x, heads, case.tables, *case.target())
    assert bool(q[:3].isfinite().all()) and float((q[:3] - case.q[:3]).abs().max()) <= 1e-4
    assert bool(case.caches[0].layers[0].k.flatten(0, 1)[case.slots[:3]].isfinite().all())
