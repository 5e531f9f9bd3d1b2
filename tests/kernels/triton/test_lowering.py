"""What comes before attention in each cache format: the cache holds what the reference chain would have put there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.contracts.config import SlotConfig
from engine.contracts.graph import Builder, Graph
from engine.contracts.ops import LinearPart, LinearSpec, Norm, RopeFacts
from engine.contracts.quantizer import PlainWeight
from engine.kernels.backends import fused_block, rotations
from engine.kernels.context import StepContext
from engine.kernels.linear import PackedLinear
from engine.kernels.model import LoweredBlock, Step
from engine.kernels.packing import Target, pack_weight
from engine.kernels.settings import Kernels, Lowering
from engine.kernels.storage import stored_tensors
from engine.kernels.torch.patterns import lower_rotations
from engine.kv.cache import KVCache
from engine.kv.groups import cache_groups
from engine.testing.context import build_context
from engine_plugins.attention_kernel.torch_paged import TorchAttention
from tests.kernels.triton.test_heads import Int8Format
from tests.launches import count_launches

HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 48, 3, 1, 32
ROPE = RopeFacts(rotary_dim=16)
QKV = [LinearPart(name, heads * HEAD_DIM) for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))]


class Unstorable(Int8Format):
    """A format that has only its torch functions."""

    def store_tile(self) -> None:
        return None


def until_attention() -> Graph:
    """Norm, projections, rotation, write into the cache, and attention."""
    b = Builder()
    x = b.input(HIDDEN)
    with b.layer(x):
        q, k, v = b.linear(b.rms_norm(x, "norm", 1e-5), *QKV, shard="out")
        b.attention(*b.rope(q, k, ROPE, HEAD_DIM), v, HEAD_DIM)
    return b.graph()


class RandomWeights:
    """What kernels ask for. Fulfils :class:`engine.kernels.settings.Weights` for the ops of this test."""

    def __init__(self, device: str, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._device = device

    def linear(self, spec: LinearSpec, *, tied: bool = False) -> PackedLinear:
        weight = torch.randn(spec.out_features, HIDDEN, generator=self._generator) * 0.3
        return pack_weight(spec, PlainWeight(weight), Target(self._device, torch.float32))

    def norm(self, op: Norm) -> Tensor:
        return (1.0 + torch.rand(HIDDEN, generator=torch.Generator().manual_seed(0))).to(self._device)


def run(kernels: Kernels, kv_format: Any, rows: int, device: str) -> tuple[Tensor, list[Tensor], list[str]]:
    """Queries, the tensors of the cache, and the names of what was launched."""
    context, graph = build_context(), until_attention()
    lowering = Lowering(
        device, torch.float32, TorchAttention(SlotConfig(), context), kv_format,
        rotations(graph), kernels,
    )  # fmt: skip
    weights: Any = RandomWeights(device, seed=rows)
    residual = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows)).to(device)
    kv = KVCache(cache_groups(graph.caches), kv_format, [8], 4, "float32", device)
    (layer,) = kv.layers.values()
    for scale in (layer.k_scale, layer.v_scale):
        if scale is not None:
            scale.fill_(0.05)
    positions = torch.arange(rows, device=device)
    tables = lower_rotations(lowering, 64)(positions)
    step = StepContext(tables, (positions + 3,), prepared=(None,), kv=kv, positions=positions, batches=())
    values = {graph.inputs[0]: residual}
    with torch.inference_mode():
        *before, attention = fused_block(graph.layers[0], lowering)
        calls = [each.kernel.lower(lowering, each, weights).call for each in before]
        steps = [Step(call, each.inputs, each.outputs, ()) for call, each in zip(calls, before, strict=True)]
        with count_launches() as launches:
            LoweredBlock(tuple(steps)).run(values, step)
    (q,) = (values[number] for number in attention.inputs)
    return q, [tensor for tensor in stored_tensors(layer) if tensor is not None], launches.names


@pytest.mark.parametrize("rows", [1, 5, 18])
@pytest.mark.parametrize("scale", ["per_layer_head", "per_token_head"])
def test_the_cache_holds_what_the_reference_chain_packs(device: str, rows: int, scale: Any) -> None:
    q, cache, names = run("triton", Int8Format(scale), rows, device)
    want_q, want, _ = run("reference", Int8Format(scale), rows, device)
    assert float((q - want_q).abs().max()) <= 1e-4
    for got, expected in zip(cache, want, strict=True):
        step = 1.0 if got.dtype == torch.int8 else 1e-5
        assert float((got.float() - expected.float()).abs().max()) <= step
    in_two = scale == "per_token_head" or rows > 16
    assert ("norm_rope_write" in names) == in_two and ("linear_rope_write" in names) != in_two


@pytest.mark.parametrize("rows", [1, 18])
def test_a_format_kernels_cannot_store_is_packed_by_its_torch_functions(device: str, rows: int) -> None:
    q, cache, names = run("triton", Unstorable("per_token_head"), rows, device)
    want_q, want, _ = run("reference", Unstorable("per_token_head"), rows, device)
    assert float((q - want_q).abs().max()) <= 1e-4
    assert float((cache[0].float() - want[0].float()).abs().max()) <= 1.0
    assert "aten.index_copy_" in names and "norm_rope_write" not in names
