"""The product kernels for real models and formats, compiled for a GPU that is not there."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from engine.contracts.quantizer import WordLoader
from engine.kernels.triton import experts, skinny
from engine.kernels.triton.narrow_types import e2m1_pairs, e4m3_pairs, int4_pairs, int8_pairs
from engine.kernels.triton.quantized import tiles
from engine.kernels.triton.tiles import MAX_ROWS, SkinnyTile, grouped_tile, mix_tile, skinny_tile
from engine.kernels.triton.weights import load_plain
from engine.testing.aot import KernelCost, measure_kernel
from engine_plugins.kv_format import tiles as kv_tiles


class Shape(NamedTuple):
    """A model's sizes, as its configuration has them."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int


MODELS = {
    "1B": Shape(2048, 8192, 32, 8, 64, 128256),
    "8B": Shape(4096, 14336, 32, 8, 128, 128256),
}


class Format(NamedTuple):
    """How a kind of weights is read: bits, types of its tensors, functions, inputs that share a scale (0: all do)."""

    bits: int
    tensors: dict[str, str]
    load_tile: Any
    unpack_tile: Any = None
    group_size: int = 0
    group_scale: Any = tiles.group_scale
    words: WordLoader | None = None

    @property
    def tile_scale(self) -> Any:
        return self.group_scale if self.group_size else None


INT8_WORDS = WordLoader(tiles.byte_words, int8_pairs, 8)
E4M3_WORDS = WordLoader(tiles.byte_words, e4m3_pairs, 8)
E2M1_WORDS = WordLoader(tiles.nibble_words, e2m1_pairs, 4)
INT4_WORDS = WordLoader(tiles.nibble_words, int4_pairs, 4)
CHANNEL = {"channel_scale_ptr": "*fp32"}
FORMATS = {
    "bf16": Format(16, {"weight_ptr": "*bf16"}, load_plain),
    "int8": Format(8, {"weight_ptr": "*i8", **CHANNEL}, tiles.load_int8, tiles.unpack_int8, words=INT8_WORDS),
    "fp8": Format(8, {"weight_ptr": "*u8", **CHANNEL}, tiles.load_int8, tiles.unpack_e4m3, words=E4M3_WORDS),
    "fp8 blocks": Format(
        8, {"weight_ptr": "*u8", "scale_ptr": "*fp32"}, tiles.load_int8_groups, tiles.unpack_e4m3_groups, 128,
        words=E4M3_WORDS,
    ),
    "int4": Format(
        4, {"weight_ptr": "*u8", "scale_ptr": "*fp16"}, tiles.load_int4_groups, tiles.unpack_int4_groups, 128,
        words=INT4_WORDS,
    ),
    "int4 zeros": Format(
        4, {"weight_ptr": "*u8", "scale_ptr": "*fp16", "zero_ptr": "*i8"},
        tiles.load_int4_groups, tiles.unpack_int4_zeros, 128, words=INT4_WORDS,
    ),
    "mxfp4": Format(
        4, {"weight_ptr": "*u8", "scale_ptr": "*u8"}, tiles.load_int4_groups, tiles.unpack_e2m1_groups, 32,
        tiles.exponent_scale, words=E2M1_WORDS,
    ),
}  # fmt: skip
PACKED = tuple(name for name in FORMATS if name != "bf16")
SMS = {80: 108, 89: 142, 90: 132}
"""Multiprocessors of an A100, an L40S and an H100 or H200, by compute capability."""

OPS = ("qkv", "out", "gate_up", "down", "head")
"""``out`` and ``down`` are one kernel, of other sizes."""
NORMED = ("qkv", "gate_up", "head")
"""Those that norm their input."""
CACHE = {
    "slots_ptr": "*i64",
    "q_ptr": "*bf16",
    "k_ptr": "*bf16",
    "v_ptr": "*bf16",
    "cos_ptr": "*fp32",
    "sin_ptr": "*fp32",
}


def size_of(op: str, model: Shape) -> tuple[int, int]:
    """Output and input features."""
    return {
        "qkv": ((model.num_heads + 2 * model.num_kv_heads) * model.head_dim, model.hidden),
        "out": (model.hidden, model.num_heads * model.head_dim),
        "gate_up": (2 * model.intermediate, model.hidden),
        "down": (model.hidden, model.intermediate),
        "head": (model.vocab, model.hidden),
    }[op]


def tile_of(op: str, model: Shape, rows: int, capability: int, weights: str) -> SkinnyTile:
    """What :func:`compile_op` compiles for."""
    form = FORMATS[weights]
    return skinny_tile(
        rows, *size_of(op, model), SMS[capability], form.bits, op in NORMED, has_words=form.words is not None
    )


def compile_skinny(
    kernel: Any, size: tuple[int, int], rows: int, capability: int, weights: str,
    arguments: dict[str, str], constants: dict[str, Any],
) -> KernelCost:  # fmt: skip
    """``size``: output and input features."""
    form = FORMATS[weights]
    is_normed = "norm_ptr" in arguments
    if rows > MAX_ROWS and kernel is not skinny.linear_store:
        tile = grouped_tile(size[1])
    else:
        has_words = form.words is not None and "WORDS" in kernel.arg_names
        tile = skinny_tile(rows, *size, SMS[capability], form.bits, is_normed, has_words)
    load, unpack, words = form.load_tile, form.unpack_tile, 0
    if tile.in_words and form.words is not None:
        load, unpack, words = form.words.load, form.words.unpack, form.words.count
        arguments = {name: kind for name, kind in arguments.items() if name != "norm_ptr"}  # rows are normed before
    if kernel is experts.expert_mix:
        tile = mix_tile(constants["TOP_K"], size[1], form.bits)
    arguments = {"x_ptr": "*bf16", "num_rows": "i32", "stride_x": "i32", "eps": "fp32", **form.tensors, **arguments}
    arguments = {name: kind for name, kind in arguments.items() if name in kernel.arg_names}
    pdl = capability >= 90
    constants = {
        "IN_FEATURES": size[1], "OUT_FEATURES": size[0], "GROUP_SIZE": form.group_size, "PDL": pdl,
        "LOAD_TILE": load, "UNPACK_TILE": unpack, "TILE_SCALE": form.tile_scale,
        "WORDS": words,
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, **constants,
    }  # fmt: skip
    constants |= {name: None for name in kernel.arg_names if name.endswith("_ptr") and name not in arguments}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    return measure_kernel(
        kernel, arguments, constants, capability,
        name=f"{kernel.__name__} {size[0]}x{size[1]} {weights} rows {rows} {_sizes(tile)}",
        unaligned=frozenset({"num_rows"}),
        num_warps=tile.num_warps, num_stages=tile.num_stages, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def _sizes(tile: SkinnyTile) -> str:
    return f"({tile.block_n}x{tile.block_k}, {tile.num_warps} warps, {tile.num_stages} stages)"


STORES: dict[str, tuple[str, dict[str, str], Any]] = {
    "native": ("*bf16", {}, None),
    "int8": ("*i8", {"k_scale_ptr": "*fp32", "v_scale_ptr": "*fp32"}, kv_tiles.store_int8),
    "fp8": ("*u8", {"k_scale_ptr": "*fp32", "v_scale_ptr": "*fp32"}, kv_tiles.store_e4m3),
}
"""Type of the cache as kernels see it, its scales and its store function, by format."""


def cache_of(store: str) -> tuple[dict[str, str], Any]:
    stored, scales, store_tile = STORES[store]
    return {**CACHE, "k_ptr": stored, "v_ptr": stored, **scales}, store_tile


@cache
def compile_op(
    op: str, model: Shape, rows: int, capability: int, weights: str = "bf16", store: str = "native"
) -> KernelCost:
    norm, out, size = {"norm_ptr": "*bf16"}, {"out_ptr": "*bf16", "stride_out": "i32"}, size_of(op, model)
    if op == "qkv":
        constants = {
            "NUM_HEADS": model.num_heads, "NUM_KV_HEADS": model.num_kv_heads, "HEAD_DIM": model.head_dim,
            "ROTARY_DIM": model.head_dim, "STORE_TILE": cache_of(store)[1],
        }  # fmt: skip
        arguments = {**norm, **cache_of(store)[0]}
        return compile_skinny(skinny.linear_rope_write, size, rows, capability, weights, arguments, constants)
    if op == "gate_up":
        return compile_skinny(skinny.linear_gate, size, rows, capability, weights, {**norm, **out}, {"ACT": "silu"})
    if op == "head":
        kinds = {"out_ptr": "*fp32", "best_ptr": "*fp32", "index_ptr": "*i32", **norm}
        return compile_skinny(skinny.linear_logits, size, rows, capability, weights, kinds, {})
    return compile_skinny(skinny.linear_store, size, rows, capability, weights, out, {"ADD": True})
