"""The Triton attention kernels compile for real GPUs, within their registers and shared memory. No GPU needed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import triton
from tests.selection import few

from engine.testing.aot import SHARED_LIMIT, KernelCost, measure_kernel
from engine_plugins.attention_kernel.triton.decode import split_attention
from engine_plugins.attention_kernel.triton.planning import MAX_SPLITS, merge_shape, prefill_block, tile_shape
from engine_plugins.attention_kernel.triton.prefill import chunk_attention
from engine_plugins.kv_format.tiles import load_e4m3, load_int8

INDEX = dict.fromkeys(("tiles_ptr", "table_ptr", "q_starts_ptr", "kv_lens_ptr"), "*i32")
OF_RANK = {"ends_ptr": "*i32", "sums_ptr": "*fp32"}
"""Where ranks share out the keys."""
STRIDES = ("table", "qt", "qh", "ot", "oh", "block", "slot", "head")
SIZES = {"reach": "i32", **{f"stride_{name}": "i32" for name in STRIDES}}
UNALIGNED = frozenset(INDEX) | {"sinks_ptr", "ends_ptr", "num_splits", "stride_table", "reach"}
"""What the kernels ask not to be specialised on."""


CACHES: dict[str, tuple[str, str, Any]] = {
    "int8": ("*i8", "per_token_head", load_int8),
    "fp8": ("*u8", "per_layer_head", load_e4m3),
}
"""Type of the cache as kernels see it, scales and load function of the 8-bit formats."""


@dataclass(frozen=True)
class Variant:
    """One specialisation of an attention kernel."""

    name: str
    kernel: Any
    arguments: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any]


def variant(
    kind: str,
    head_dim: int,
    capability: int,
    *,
    dtype: str = "bf16",
    block_m: int = 16,
    block_size: int = 16,
    splits: int = MAX_SPLITS,
    window: bool = False,
    cap: bool = False,
    cache: str | None = None,
    sinks: bool = False,
    value_dim: int | None = None,
    shared: bool = False,
) -> Variant:
    """``shared``: ranks share out the keys."""
    itemsize, latent = 4 if dtype == "fp32" else 2, value_dim is not None
    if kind == "prefill":
        block_m = prefill_block(head_dim, itemsize, latent)
    shape = tile_shape(kind == "decode", block_m, head_dim, itemsize, value_dim)
    # Dependent launch is what runs on 9.0 and later, and what compiles nowhere else.
    pdl = capability >= 90
    data = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{dtype}")
    arguments = {**data, **INDEX, **SIZES, "scale": "fp32", "soft_cap": "fp32"}
    group, num_kv_heads = (128, 1) if latent else (8, 8) if sinks else (4, 8)
    constants = {
        "k_scale_ptr": None, "v_scale_ptr": None, "GROUP": group, "NUM_KV_HEADS": num_kv_heads, "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim or head_dim, "BLOCK_SIZE": block_size, "BLOCK_M": block_m, "BLOCK_N": shape.block_n,
        "BLOCK_D": shape.block_d, "BLOCK_R": shape.block_r,
        "REACH": "window" if window else "full", "HAS_CAP": cap, "SCALE": "none", "LOAD_TILE": None, "PDL": pdl,
    }  # fmt: skip
    if cache is not None:
        stored, scale, load_tile = CACHES[cache]
        arguments |= {"k_ptr": stored, "v_ptr": stored, "k_scale_ptr": "*fp32", "v_scale_ptr": "*fp32"}
        constants = {name: value for name, value in constants.items() if name not in arguments}
        constants |= {"SCALE": scale, "LOAD_TILE": load_tile}
    if sinks:
        arguments["sinks_ptr"] = "*fp32"
    else:
        constants["sinks_ptr"] = None
    if shared:
        arguments |= OF_RANK
    else:
        constants |= dict.fromkeys(OF_RANK)
    if latent:
        del arguments["v_ptr"]
        constants["v_ptr"] = None
    dims = f"{head_dim}/{value_dim}" if latent else f"{head_dim}"
    kernel, name = chunk_attention, f"prefill {dtype} head_dim {dims} window {window} cap {cap} sinks {sinks}"
    if kind == "decode":
        kernel, name = split_attention, f"decode {dtype} head_dim {dims} block_m {block_m} splits {splits}"
        arguments |= {"part_ptr": "*fp32", "lse_ptr": "*fp32", "arrived_ptr": "*i32", "num_splits": "i32"}
        lanes, merge_m = merge_shape(splits, block_m, shape.block_d)
        constants |= {"SPLIT": splits > 1, "LANES": lanes, "MERGE_M": merge_m}
    options = {**shape.options, "launch_pdl": pdl}
    return Variant(name, kernel, arguments, constants, options)


@cache
def compile_attention(kind: str, head_dim: int, capability: int, **choices: Any) -> KernelCost:
    one = variant(kind, head_dim, capability, **choices)
    return measure_kernel(
        one.kernel, one.arguments, one.constants, capability, name=one.name, unaligned=UNALIGNED, **one.options
    )


HOPPER_FIRST = [90, *(pytest.param(capability, marks=pytest.mark.slow) for capability in (80, 89))]
"""Every kind of attention compiles for Hopper in every run, the plain one for all three architectures, and 8-bit
caches for 8.0 too, which does not convert them itself; the rest of the product on demand."""
OLD = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)
"""A release whose assembler spills a few words more."""


def decode_spills(capability: int) -> int:
    """Bytes. The assembler of older Triton releases spills up to four words before Hopper to reach the next step of
    occupancy, although registers are left."""
    return 16 if OLD and capability < 90 else 0


def assert_fits(cost: KernelCost, spills: int = 0) -> None:
    print(cost)
    assert cost.shared <= SHARED_LIMIT[cost.capability], cost
    assert cost.spill_stores <= spills and cost.spill_loads <= spills, cost


@few(1)
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_the_decode_path_compiles_without_spills(capability: int) -> None:
    for wide in ({}, {"block_m": 32, "splits": 16}):
        assert_fits(compile_attention("decode", 128, capability, **wide), decode_spills(capability))


def test_the_prefill_path_compiles_without_spills_on_hopper() -> None:
    assert_fits(compile_attention("prefill", 128, 90))


@pytest.mark.slow
@pytest.mark.parametrize("capability", HOPPER_FIRST)
def test_latent_attention_compiles_without_spills(capability: int) -> None:
    """Keys of 512 + 64 numbers, of which the first 512 are the value too."""
    latent = {"value_dim": 512, "block_size": 64}
    for block_m in (16, 32):
        assert_fits(compile_attention("decode", 576, capability, block_m=block_m, splits=16, **latent))
    if capability == 90:
        assert_fits(compile_attention("prefill", 576, capability, **latent))


@pytest.mark.parametrize("capability", HOPPER_FIRST)
def test_sinks_compile_without_spills(capability: int) -> None:
    """Eight heads of 64 a key-value head, with a window and without."""
    for window in (False, True):
        assert_fits(compile_attention("decode", 64, capability, sinks=True, window=window))


@few(1)
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_attention_to_the_keys_of_one_rank_compiles_without_spills(capability: int) -> None:
    few = decode_spills(capability)
    assert_fits(compile_attention("decode", 128, capability, shared=True), few)
    latent = {"value_dim": 512, "block_size": 64, "block_m": 32, "splits": 16}
    assert_fits(compile_attention("decode", 576, capability, shared=True, **latent))
    if capability == 90:
        assert_fits(compile_attention("prefill", 128, capability, shared=True))


TILES = {"unsplit": (16, 1), "split": (16, MAX_SPLITS), "wide": (32, 16)}
"""Queries of a tile, and the number of splits."""


@few(2)
@pytest.mark.parametrize("capability", [80, pytest.param(89, marks=pytest.mark.slow), 90])
@pytest.mark.parametrize(
    ("cache", "tile"),
    [
        ("int8", "split"), ("fp8", "wide"),
        *(pytest.param("int8", tile, marks=pytest.mark.slow) for tile in ("unsplit", "wide")),
        *(pytest.param("fp8", tile, marks=pytest.mark.slow) for tile in ("unsplit", "split")),
    ],
)  # fmt: skip
def test_8_bit_caches_are_decoded_without_spills(cache: str, tile: str, capability: int) -> None:
    """Before Hopper up to four words outside of the loop may spill, to reach the next step of occupancy."""
    block_m, splits = TILES[tile]
    cost = compile_attention("decode", 128, capability, block_m=block_m, splits=splits, cache=cache)
    assert_fits(cost, spills=16 if OLD or capability < 90 else 0)


@few(1)
@pytest.mark.parametrize("cache", CACHES)
def test_8_bit_caches_serve_prompts_without_spills_on_hopper(cache: str) -> None:
    assert_fits(compile_attention("prefill", 128, 90, cache=cache), spills=64 if OLD else 0)


def test_the_last_program_acquires_what_the_others_released_and_reads_it_past_its_own_cache() -> None:
    """One atomic, between a barrier of the program's stores and loads that go to the L2."""
    ptx = compile_attention("decode", 128, 90).ptx
    (arrival,) = re.finditer(r"atom\.(?=\S*acq_rel)(?=\S*gpu)\S*add\S*", ptx)
    before, after = ptx[: arrival.start()], ptx[arrival.end() :]
    between = before[before.rindex("st.global") :]
    assert "bar.sync" in between or "barrier.sync" in between
    assert "ld.global.cg" in after and "ld.global.cg" not in before
    assert not re.search(r"ld\.global(?!\.cg)", after[: after.rindex("ld.global.cg")])


def test_dependents_start_first_and_nothing_that_changes_is_read_before_the_wait() -> None:
    ptx = compile_attention("decode", 128, 90).ptx
    early, late = ptx.index("griddepcontrol.launch_dependents"), ptx.index("griddepcontrol.wait")
    assert early < late and "ld.global" not in ptx[:early]
    assert ptx[early:late].count("ld.global") == 2, "the two numbers of a tile"
    assert "st.global" not in ptx[:late] and "ret;" not in ptx[:late]


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_decode_variant_compiles_without_spills(head_dim: int, capability: int) -> None:
    """Tiles of 64 queries serve chunks, not decode; before Hopper a few words of theirs may spill, as in prefill."""
    few = decode_spills(capability)
    for block_m, spills in ((16, few), (32, few), (64, 0 if capability >= 90 else 160)):
        # Only the tiles of 16 queries are split further than 16 times.
        for splits in (1, 16, MAX_SPLITS) if block_m == 16 else (1, 16):
            assert_fits(compile_attention("decode", head_dim, capability, block_m=block_m, splits=splits), spills)
    assert_fits(compile_attention("decode", head_dim, capability, window=True, cap=True), few)
    assert_fits(compile_attention("decode", head_dim, capability, block_size=64), few)
    assert_fits(compile_attention("decode", head_dim, capability, dtype="fp16"), few)


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
    for kind in ("decode", "prefill"):
        assert_fits(compile_attention(kind, 576, capability, dtype="fp32", value_dim=512, splits=16), spills=64)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_other_variants_of_sinks_and_latent_attention_compile(capability: int) -> None:
    few = 0 if capability >= 90 else 160
    for window in (False, True):
        assert_fits(compile_attention("prefill", 64, capability, sinks=True, window=window), few)
    for splits in (1, 16):
        assert_fits(compile_attention("decode", 64, capability, sinks=True, block_m=32, splits=splits), few)
    for stored in CACHES:
        for block_m in (16, 32):
            tile = {"block_m": block_m, "splits": 16, "cache": stored, "value_dim": 512, "block_size": 64}
            assert_fits(compile_attention("decode", 576, capability, **tile))
    assert_fits(compile_attention("prefill", 576, capability, value_dim=512, block_size=64))
