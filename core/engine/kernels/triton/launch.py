"""Skinny linear layers as launches: which tile, which arguments, on which device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
from torch import Tensor

from engine.contracts.attention_kernel import LayerCache
from engine.contracts.quantizer import TileLoader
from engine.kernels.storage import largest_value, stored_tensors
from engine.kernels.triton.device import has_dependent_launch, multiprocessors
from engine.kernels.triton.heads import norm_rope_write
from engine.kernels.triton.rowwise import best_of_blocks, best_of_chunks, gate_rows, norm_rows, quantize_rows
from engine.kernels.triton.skinny import linear_gate, linear_logits, linear_rope_write, linear_store
from engine.kernels.triton.tiles import SkinnyTile, skinny_tile

CHUNK = 4096
"""Logits that one program compares where they come from elsewhere."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What every launch on a device shares."""

    num_sms: int
    """Multiprocessors that tiles are chosen for."""
    pdl: bool
    """Programmatic dependent launch (compute capability 9.0): a kernel starts, and loads weights, while the one before
    it ends."""

    @staticmethod
    def on(device: str) -> Launch:
        """For a torch device, by name (``cuda``, ``cuda:1``; ``cpu`` under Triton's interpreter)."""
        return Launch(multiprocessors(device), has_dependent_launch(device))

    def options(self, num_warps: int, num_stages: int = 2) -> dict[str, Any]:
        """Keyword arguments of a launch: the kernel's ``PDL``, and Triton's own options."""
        # The default of enable_fp_fusion changes between Triton releases; fused multiply-add is wanted in either.
        pdl = {"launch_pdl": True} if self.pdl else {}
        return {"PDL": self.pdl, "num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True, **pdl}


@dataclass(frozen=True, slots=True)
class NormWeight:
    """The weight of an RMSNorm: ``[in_features]`` where a layer's input is normed, ``[head_dim]`` where each query or
    key head is. Contiguous, float32, or the compute dtype if that holds the same values."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The heads of a q, k and v projection. ``rotary_dim``: 0 without rotation; both dimensions are even."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int

    def constants(self) -> dict[str, int]:
        return {
            "NUM_HEADS": self.num_heads,
            "NUM_KV_HEADS": self.num_kv_heads,
            "HEAD_DIM": self.head_dim,
            "ROTARY_DIM": self.rotary_dim,
        }


@dataclass(frozen=True, slots=True)
class SkinnyLinear:
    """``norm(x) @ W.T + bias`` and what follows it, for 1 to 16 rows ``x [rows, in_features]`` in one kernel; for up
    to 64 without a norm. Where tensor cores read words, a kernel before it norms the rows."""

    launch: Launch
    loader: TileLoader
    in_features: int
    out_features: int
    norm: NormWeight | None = None

    def store(self, x: Tensor) -> Tensor:
        """``[rows, out_features]`` in the dtype of ``x``."""
        out = torch.empty(x.shape[0], self.out_features, dtype=x.dtype, device=x.device)
        self._store(x, out, add=False)
        return out

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual [rows, out_features]``, to which the product was added in place."""
        self._store(x, residual, add=True)
        return residual

    def gate(self, x: Tensor, act: str) -> Tensor:
        """``act(gate) * up [rows, out_features / 2]``."""
        out = torch.empty(x.shape[0], self.out_features // 2, dtype=x.dtype, device=x.device)
        x, tile = self._normed(x)
        linear_gate[self._grid(tile)](
            *self._tensors(x, tile), out, x.shape[0], x.stride(0), out.stride(0), self._eps(),
            OUT_FEATURES=self.out_features, ACT=act, **self._constants(tile),
        )  # fmt: skip
        return out

    def rope_write(
        self, x: Tensor, heads: HeadShape, tables: tuple[Tensor, Tensor] | None, slots: Tensor, cache: LayerCache
    ) -> Tensor:
        """Queries ``[rows, num_heads, head_dim]``, rotated; keys and values are in the cache.

        ``tables``: float32 cosines and sines, ``[rows, 1, rotary_dim / 2]``, or ``None`` if nothing rotates.
        ``slots``: int64 ``[rows]``, contiguous: ``block * block_size + offset`` of each token, negative for none.
        Scales per token need whole heads: those are :class:`HeadWriter`'s.
        """
        q = torch.empty(x.shape[0], heads.num_heads, heads.head_dim, dtype=x.dtype, device=x.device)
        cos, sin = tables or (None, None)
        x, tile = self._normed(x)
        linear_rope_write[self._grid(tile)](
            *self._tensors(x, tile), cos, sin, slots, q, *stored_tensors(cache),
            x.shape[0], x.stride(0), self._eps(),
            STORE_TILE=cache.format.store_tile(), **heads.constants(), **self._constants(tile),
        )  # fmt: skip
        return q

    def logits(
        self, x: Tensor, *, greedy: bool = False, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """float32 logits ``[rows, out_features]``, in ``out`` if given; with ``greedy`` also the largest one's column,
        int64 ``[rows]``, as :func:`argmax_rows` has it."""
        (x, tile), rows = self._normed(x), x.shape[0]
        if out is None:
            out = torch.empty(rows, self.out_features, dtype=torch.float32, device=x.device)
        assert out.shape == (rows, self.out_features) and out.is_contiguous() and out.dtype == torch.float32
        parts = _empty_parts(rows, tile.programs(self.out_features), x.device) if greedy else None
        best, index = parts or (None, None)
        linear_logits[self._grid(tile)](
            *self._tensors(x, tile), out, best, index, rows, x.stride(0), self._eps(),
            OUT_FEATURES=self.out_features, **self._constants(tile),
        )  # fmt: skip
        return out, None if parts is None else argmax_partials(*parts, self.launch)

    def _store(self, x: Tensor, out: Tensor, add: bool) -> None:
        assert out.stride(1) == 1
        x, tile = self._normed(x)
        linear_store[self._grid(tile)](
            *self._tensors(x, tile), out, x.shape[0], x.stride(0), out.stride(0), self._eps(),
            OUT_FEATURES=self.out_features, ADD=add, **self._constants(tile),
        )  # fmt: skip

    def _normed(self, x: Tensor) -> tuple[Tensor, SkinnyTile]:
        """The tile for these rows, and what its kernel multiplies: the rows, or what their norm made of them."""
        assert x.shape[1] == self.in_features and x.stride(1) == 1
        tile = self._tile(x)
        if tile.in_words and self.norm is not None:
            x = normed_rows(x, self.norm, self.launch)
        return x, tile

    def _tile(self, x: Tensor) -> SkinnyTile:
        bits = self.loader.bits_per_weight(self.in_features, self.out_features)
        has_norm = self.norm is not None
        # Inputs are read in words, four at a time; normed ones are in memory of their own.
        in_words = has_norm or (x.stride(0) % 8 == 0 and x.data_ptr() % 4 == 0)
        has_words = self.loader.words is not None and x.dtype == torch.bfloat16 and in_words
        return skinny_tile(
            x.shape[0], self.out_features, self.in_features, self.launch.num_sms, bits, has_norm, has_words
        )

    def _grid(self, tile: SkinnyTile) -> tuple[int]:
        return (tile.programs(self.out_features),)

    def _eps(self) -> float:
        return 0.0 if self.norm is None else self.norm.eps

    def _tensors(self, x: Tensor, tile: SkinnyTile) -> tuple[Tensor | None, ...]:
        loader, norm = self.loader, None if self.norm is None or tile.in_words else self.norm.weight
        return (x, norm, loader.weight, loader.scale, loader.zero, loader.channel_scale, loader.bias)

    def _constants(self, tile: SkinnyTile) -> dict[str, Any]:
        loader, words = self.loader, 0
        load, unpack = loader.load_tile, loader.unpack_tile
        if tile.in_words and loader.words is not None:
            load, unpack, words = loader.words.load, loader.words.unpack, loader.words.count
        return {
            "IN_FEATURES": self.in_features,
            "GROUP_SIZE": self.loader.group_size,
            "LOAD_TILE": load,
            "UNPACK_TILE": unpack,
            "TILE_SCALE": self.loader.tile_scale,
            "WORDS": words,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            **self.launch.options(tile.num_warps, tile.num_stages),
        }


@dataclass(frozen=True, slots=True)
class HeadWriter:
    """Norm of query and key heads, rotation and cache write, for any number of tokens, in one kernel."""

    launch: Launch
    heads: HeadShape
    q_norm: NormWeight | None = None
    k_norm: NormWeight | None = None

    def __call__(self, qkv: Tensor, tables: tuple[Tensor, Tensor] | None, slots: Tensor, cache: LayerCache) -> Tensor:
        """``qkv [num_tokens, (heads + 2 kv_heads) * head_dim]`` -> queries ``[num_tokens, num_heads, head_dim]``.

        ``tables`` and ``slots`` as in :meth:`SkinnyLinear.rope_write`.
        """
        assert qkv.stride(1) == 1
        heads = self.heads
        num_tokens, total = qkv.shape[0], heads.num_heads + 2 * heads.num_kv_heads
        q = torch.empty(num_tokens, heads.num_heads, heads.head_dim, dtype=qkv.dtype, device=qkv.device)
        cos, sin = tables or (None, None)
        block_p = triton.next_power_of_2(heads.head_dim // 2)
        block_h = max(1, 256 // block_p)  # two of four warps' worth of pairs: small programs, many of them
        q_norm, k_norm = self.q_norm, self.k_norm
        norm_rope_write[(num_tokens, triton.cdiv(total, block_h))](
            qkv, q_norm and q_norm.weight, k_norm and k_norm.weight, cos, sin,
            slots, q, *stored_tensors(cache),
            qkv.stride(0), q_norm.eps if q_norm else 0.0, k_norm.eps if k_norm else 0.0,
            SCALE=cache.format.scale, LARGEST=largest_value(cache.k.dtype), STORE_TILE=cache.format.store_tile(),
            BLOCK_H=block_h, BLOCK_P=block_p, **heads.constants(), **self.launch.options(2),
        )  # fmt: skip
        return q


def gated_activation(gate_up: Tensor, act: str, launch: Launch) -> Tensor:
    """``act(gate) * up`` of ``gate_up [rows, 2 * size]``, gates first -> ``[rows, size]``, contiguous, in its dtype.

    Any floating dtype, computed in float32; rows of ``gate_up`` may lie apart. ``act``: ``silu`` or ``gelu_tanh``.
    """
    assert gate_up.stride(1) == 1
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(size))
    gate_rows[(rows, triton.cdiv(size, block))](
        gate_up, out, gate_up.stride(0), SIZE=size, ACT=act, BLOCK=block, **launch.options(4)
    )
    return out


def normed_rows(x: Tensor, norm: NormWeight, launch: Launch) -> Tensor:
    """RMSNorm of ``x [rows, size]``, whose rows may lie apart: rounded once to its dtype, contiguous."""
    assert x.stride(1) == 1
    rows, size = x.shape
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    norm_rows[(rows,)](
        x, norm.weight, out, x.stride(0), norm.eps,
        SIZE=size, BLOCK=min(4096, triton.next_power_of_2(size)), **launch.options(4),
    )  # fmt: skip
    return out


def quantized_rows(
    x: Tensor, norm: NormWeight | None, kind: Literal["int8", "fp8"], launch: Launch
) -> tuple[Tensor, Tensor]:
    """RMSNorm, if any, and rounding of each row to 8 bits, in one kernel.

    ``x [rows, size]`` -> int8 or float8_e4m3fn ``[rows, size]`` and float32 steps ``[rows, 1]``: what was rounded is
    ``codes * step``, the largest of a row being 127 or 448 steps.
    """
    assert x.stride(1) == 1
    rows, size = x.shape
    codes = torch.empty(rows, size, dtype=torch.int8 if kind == "int8" else torch.uint8, device=x.device)
    steps = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    quantize_rows[(rows,)](
        x, weight, codes, steps, x.stride(0), eps,
        SIZE=size, FLOAT8=kind == "fp8", BLOCK=min(2048, triton.next_power_of_2(size)), **launch.options(4),
    )  # fmt: skip
    return codes if kind == "int8" else codes.view(torch.float8_e4m3fn), steps


def argmax_rows(logits: Tensor, launch: Launch) -> Tensor:
    """Column of the largest of contiguous float32 ``[rows, vocab]``, int64 ``[rows]``; the lowest of equals,
    ``NOT_FINITE`` (-1) where a logit is NaN or the largest is infinite."""
    assert logits.is_contiguous() and logits.dtype == torch.float32
    rows, vocab = logits.shape
    block = min(CHUNK, triton.next_power_of_2(vocab))
    chunks = triton.cdiv(vocab, block)
    best, index = _empty_parts(rows, chunks, logits.device)
    best_of_chunks[(rows, chunks)](logits, best, index, VOCAB=vocab, BLOCK=block, **launch.options(4))
    return argmax_partials(best, index, launch)


def argmax_partials(best: Tensor, index: Tensor, launch: Launch) -> Tensor:
    """Second stage: ``best`` float32 and ``index`` int32 ``[rows, parts]`` -> the best index, int64 ``[rows]``,
    as :func:`argmax_rows` has it."""
    rows, parts = best.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=best.device)
    block = min(1024, triton.next_power_of_2(parts))
    best_of_blocks[(rows,)](best, index, tokens, COUNT=parts, BLOCK=block, **launch.options(4))
    return tokens


def _empty_parts(rows: int, parts: int, device: torch.device) -> tuple[Tensor, Tensor]:
    best = torch.empty(rows, parts, dtype=torch.float32, device=device)
    return best, torch.empty(rows, parts, dtype=torch.int32, device=device)
