"""The qkv op in each cache format: the cache holds what the reference chain would have put there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from engine.kernels.lowering import Kernels, Lowering, lower_layer_op, lower_rotations
from torch import Tensor

from engine.contracts.config import ParallelismConfig, SlotConfig
from engine.contracts.ops import LinearPart, LinearSpec, NormQKVRopeWrite, NormSpec, RopeFacts
from engine.contracts.quantizer import PackedLinear
from engine.kernels.model import StepContext
from engine.kernels.storage import stored_tensors
from engine.kv.cache import KVCache
from engine.testing.context import build_context
from engine_plugins.attention_kernel.torch_paged import TorchAttention
from engine_plugins.parallelism.single import SingleDevice
from engine_plugins.quantizer.unquantized import pack_plain
from tests.kernels.triton.test_heads import Int8Format
from tests.launches import count_launches

HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 48, 3, 1, 32
ROPE = RopeFacts(rotary_dim=16)
QKV = LinearSpec((LinearPart("qkv", (HEADS + 2 * KV_HEADS) * HEAD_DIM),), HIDDEN)
OP = NormQKVRopeWrite(NormSpec("norm", 1e-5), QKV, HEADS, KV_HEADS, HEAD_DIM, ROPE)


class Unstorable(Int8Format):
    """A format that has only its torch functions."""

    def store_tile(self) -> None:
        return None


def run(kernels: Kernels, kv_format: Any, rows: int, device: str) -> tuple[Tensor, list[Tensor], list[str]]:
    """Queries, the tensors of the cache, and the names of what was launched."""
    context = build_context()
    lowering = Lowering(
        device, torch.float32, TorchAttention(SlotConfig(), context), kv_format,
        SingleDevice(ParallelismConfig(), context), (ROPE,), kernels,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(QKV.out_features, HIDDEN, generator=generator) * 0.3
    residual = torch.randn(rows, HIDDEN, generator=generator).to(device)
    packed: PackedLinear = pack_plain(QKV, [{"weight": weight}], torch.float32, device)
    norms = {"norm": (1.0 + torch.rand(HIDDEN, generator=generator)).to(device)}
    model = replace(context.model, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    kv = KVCache(model, kv_format, 8, 4, "float32", device)
    (layer,) = kv.layers
    for scale in (layer.k_scale, layer.v_scale):
        if scale is not None:
            scale.fill_(0.05)
    positions = torch.arange(rows, device=device)
    rotations = lower_rotations(lowering, HEAD_DIM, 64)(positions)
    step = StepContext(rotations=rotations, slot_mapping=positions + 3, prepared=None, kv=kv)
    with torch.inference_mode(), count_launches() as launches:
        op = lower_layer_op(lowering, OP, 0, norms, packed)
        del launches.names[:]
        _, q = op(residual, residual, step)
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
