"""The Triton attention kernels compile for real GPUs, within their registers and shared memory. No GPU needed."""

from __future__ import annotations

import pytest
import triton
import triton.language as tl

from engine.testing.aot import SHARED_LIMIT, KernelCost, measure_kernel
from engine_plugins.attention_kernel.triton.decode import split_attention
from engine_plugins.attention_kernel.triton.planning import MAX_SPLITS, prefill_block, tile_shape
from engine_plugins.attention_kernel.triton.prefill import chunk_attention
from engine_plugins.attention_kernel.triton.reduce import merge_splits

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="interpreted kernels cannot be compiled")

INDEX = dict.fromkeys(("tiles_ptr", "table_ptr", "q_starts_ptr", "kv_lens_ptr"), "*i32")
STRIDES = ("table", "qt", "qh", "ot", "oh", "block", "slot", "head")
SIZES = {"window": "i32", **{f"stride_{name}": "i32" for name in STRIDES}}
UNALIGNED = frozenset(INDEX) | {"num_splits", "stride_table", "window"}
"""What the kernels ask not to be specialised on."""


@triton.jit
def load_int8(ptr, offsets, mask, scale_ptr, scale_offsets, DTYPE: tl.constexpr):
    scale = tl.load(scale_ptr + scale_offsets)
    return tl.where(mask, tl.load(ptr + offsets, mask=mask, other=0).to(tl.float32) * scale, 0.0).to(DTYPE)


def compile_attention(
    kind: str,
    head_dim: int,
    capability: int,
    *,
    dtype: str = "bf16",
    block_m: int = 16,
    block_size: int = 16,
    split: bool = True,
    window: bool = False,
    cap: bool = False,
    int8_cache: bool = False,
) -> KernelCost:
    itemsize = 4 if dtype == "fp32" else 2
    if kind == "prefill":
        block_m = prefill_block(head_dim, itemsize)
    shape = tile_shape(kind == "decode", block_m, head_dim, itemsize)
    data = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{dtype}")
    arguments = {**data, **INDEX, **SIZES, "scale": "fp32", "soft_cap": "fp32"}
    constants = {
        "k_scale_ptr": None, "v_scale_ptr": None, "GROUP": 4, "NUM_KV_HEADS": 8, "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size, "BLOCK_M": block_m, "BLOCK_N": shape.block_n, "BLOCK_D": shape.block_d,
        "HAS_WINDOW": window, "HAS_CAP": cap, "SCALE": "none", "LOAD_TILE": None,
    }  # fmt: skip
    if int8_cache:
        arguments |= {"k_ptr": "*i8", "v_ptr": "*i8", "k_scale_ptr": "*fp32", "v_scale_ptr": "*fp32"}
        constants = {name: value for name, value in constants.items() if name not in arguments}
        constants |= {"SCALE": "per_token_head", "LOAD_TILE": load_int8}
    kernel = chunk_attention
    if kind == "decode":
        kernel = split_attention
        arguments |= {"part_ptr": "*fp32", "lse_ptr": "*fp32", "num_splits": "i32"}
        constants["SPLIT"] = split
    name = f"{kind} {dtype} head_dim {head_dim} block_m {block_m} window {window} cap {cap}"
    return measure_kernel(
        kernel, arguments, constants, capability,
        name=name, unaligned=UNALIGNED, num_warps=shape.num_warps, num_stages=shape.num_stages,
    )  # fmt: skip


def compile_merge(head_dim: int, capability: int) -> KernelCost:
    block_d = tile_shape(True, 16, head_dim, 2).block_d
    arguments = {
        "out_ptr": "*bf16", "part_ptr": "*fp32", "lse_ptr": "*fp32", "num_splits": "i32",
        "stride_ot": "i32", "stride_oh": "i32",
        **{name: INDEX[name] for name in ("tiles_ptr", "q_starts_ptr", "kv_lens_ptr")},
    }  # fmt: skip
    constants = {
        "GROUP": 4, "NUM_KV_HEADS": 8, "HEAD_DIM": head_dim, "BLOCK_M": 16, "BLOCK_D": block_d,
        "MAX_SPLITS": MAX_SPLITS,
    }  # fmt: skip
    return measure_kernel(
        merge_splits, arguments, constants, capability,
        name=f"merge head_dim {head_dim}", unaligned=UNALIGNED & arguments.keys(), num_warps=4,
    )  # fmt: skip


def assert_fits(cost: KernelCost, spills: int = 0) -> None:
    print(cost)
    assert cost.shared <= SHARED_LIMIT[cost.capability], cost
    assert cost.spill_stores <= spills and cost.spill_loads <= spills, cost


@pytest.mark.parametrize("capability", [80, 89, 90])
def test_the_decode_path_compiles_without_spills(capability: int) -> None:
    assert_fits(compile_attention("decode", 128, capability))
    assert_fits(compile_merge(128, capability))


def test_the_prefill_path_compiles_without_spills_on_hopper() -> None:
    assert_fits(compile_attention("prefill", 128, 90))


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_a_formats_load_function_is_compiled_into_the_kernel(kind: str) -> None:
    assert_fits(compile_attention(kind, 128, 90, int8_cache=True))


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_decode_variant_compiles_without_spills(head_dim: int, capability: int) -> None:
    """Tiles of 64 queries serve chunks, not decode; before Hopper a few words of theirs may spill, as in prefill."""
    for block_m, spills in ((16, 0), (32, 0), (64, 0 if capability >= 90 else 160)):
        for split in (True, False):
            assert_fits(compile_attention("decode", head_dim, capability, block_m=block_m, split=split), spills)
    assert_fits(compile_attention("decode", head_dim, capability, window=True, cap=True))
    assert_fits(compile_attention("decode", head_dim, capability, block_size=64))
    assert_fits(compile_attention("decode", head_dim, capability, dtype="fp16"))
    assert_fits(compile_merge(head_dim, capability))


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_prefill_variant_compiles(head_dim: int, capability: int) -> None:
    """Before Hopper the accumulator and the fragments share 255 registers; a few words may spill."""
    spills = 0 if capability >= 90 else 160
    for window, cap in ((False, False), (True, False), (False, True)):
        assert_fits(compile_attention("prefill", head_dim, capability, window=window, cap=cap), spills)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_float32_compiles(capability: int) -> None:
    for head_dim in (64, 128):
        for kind in ("decode", "prefill"):
            assert_fits(compile_attention(kind, head_dim, capability, dtype="fp32"), spills=64)
