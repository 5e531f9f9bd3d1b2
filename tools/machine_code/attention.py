"""The attention kernels for real models, compiled for a GPU that is not there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from tools.machine_code.figures import Row

from engine.testing.aot import KernelCost, measure_kernel
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
    shape = tile_shape(kind == "decode", block_m, head_dim, itemsize, value_dim, divmod(capability, 10))
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


def row_of(kind: str, head_dim: int, capability: int, cache: str | None = None) -> Row:
    """Of one query, and of a prompt, in bfloat16."""
    one = variant(kind, head_dim, capability, cache=cache)
    cost = compile_attention(kind, head_dim, capability, cache=cache)
    # Each number of a prompt's cache is read for many queries: their arithmetic sets the pace.
    numbers = 2 * one.constants["BLOCK_N"] * head_dim / (32 * one.options["num_warps"]) if kind == "decode" else None
    return Row.of(f"{kind} head_dim {head_dim}", f"{cache or 'bf16'} KV", 1, cost, numbers, 16 if cache is None else 8)


@cache
def compile_attention(kind: str, head_dim: int, capability: int, **choices: Any) -> KernelCost:
    one = variant(kind, head_dim, capability, **choices)
    return measure_kernel(
        one.kernel, one.arguments, one.constants, capability, name=one.name, unaligned=UNALIGNED, **one.options
    )
