"""Mixtures of experts as launches: pairs of a token and an expert one by one, or sorted by expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.contracts.quantizer import TileLoader
from engine.kernels.triton.experts import expert_down, expert_gate, expert_mix
from engine.kernels.triton.launch import Launch
from engine.kernels.triton.tiles import MAX_ROWS, SkinnyTile, skinny_tile


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts of a layer: ``gate_up [num_experts * 2 * size, in]`` and ``down [num_experts * out, size]``."""

    launch: Launch
    num_experts: int
    top_k: int
    in_features: int
    size: int
    out_features: int
    gate_up: TileLoader
    down: TileLoader
    act: str

    def __call__(self, x: Tensor, ids: Tensor, shares: Tensor, residual: Tensor | None, overwrite: bool) -> Tensor:
        """``[num_tokens, out]``: the mixture, added to ``residual`` if there is one, in its memory with ``overwrite``.

        ``ids``: int64, ``shares``: float32, ``[num_tokens, top_k]``. Nothing is read on the host."""
        if ids.numel() * 4 <= self.num_experts or x.shape[0] == 1:
            return self._one_by_one(x, ids, shares, residual, overwrite)
        made = self._sorted(x, ids, shares)
        if residual is None:
            return made
        return residual.add_(made) if overwrite else residual + made

    def _one_by_one(self, x: Tensor, ids: Tensor, shares: Tensor, residual: Tensor | None, overwrite: bool) -> Tensor:
        """Two launches; experts of two tokens are read twice."""
        pairs, tokens = ids.numel(), x.shape[0]
        gated = torch.empty(pairs, self.size, dtype=x.dtype, device=x.device)
        tile = self._tile(self.gate_up, 1, 2 * self.size, self.in_features)
        expert_gate[(pairs, tile.programs(2 * self.size))](
            x, None, None, ids, *_tensors(self.gate_up), gated, x.stride(0), self.top_k,
            IN_FEATURES=self.in_features, SIZE=self.size, ACT=self.act, **self._constants(self.gate_up, tile),
        )  # fmt: skip
        out = residual if overwrite and residual is not None else x.new_empty(tokens, self.out_features)
        tile = self._tile(self.down, 1, self.out_features, self.size)
        constants = self._constants(self.down, tile)
        del constants["BLOCK_M"]
        expert_mix[(tokens, tile.programs(self.out_features))](
            gated, ids, shares, *_tensors(self.down), residual, out,
            TOP_K=self.top_k, IN_FEATURES=self.size, OUT_FEATURES=self.out_features, **constants,
        )  # fmt: skip
        return out

    def _sorted(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        order, first, count, expert = self._tiles(ids)
        rows = x.index_select(0, order // self.top_k)
        pairs, tiles = ids.numel(), expert.numel()
        gated = torch.empty(pairs, self.size, dtype=x.dtype, device=x.device)
        tile = self._tile(self.gate_up, MAX_ROWS, 2 * self.size, self.in_features)
        expert_gate[(tiles, tile.programs(2 * self.size))](
            rows, first, count, expert, *_tensors(self.gate_up), gated, rows.stride(0), 1,
            IN_FEATURES=self.in_features, SIZE=self.size, ACT=self.act, **self._constants(self.gate_up, tile),
        )  # fmt: skip
        made = torch.empty(pairs, self.out_features, dtype=torch.float32, device=x.device)
        tile = self._tile(self.down, MAX_ROWS, self.out_features, self.size)
        expert_down[(tiles, tile.programs(self.out_features))](
            gated, first, count, expert, *_tensors(self.down), made,
            IN_FEATURES=self.size, OUT_FEATURES=self.out_features, **self._constants(self.down, tile),
        )  # fmt: skip
        by_token = torch.empty_like(made).index_copy_(0, order, made).view(-1, self.top_k, self.out_features)
        return torch.einsum("tko,tk->to", by_token, shares).to(x.dtype)

    def _tiles(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Pairs in the order of their experts, int64, and tiles of them: first pair, count and expert (-1: none)."""
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        counts = torch.zeros(self.num_experts, dtype=torch.int64, device=ids.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        ends, tiles = counts.cumsum(0), (counts + MAX_ROWS - 1) // MAX_ROWS
        tile_ends = tiles.cumsum(0)
        number = torch.arange(flat.numel() // MAX_ROWS + min(flat.numel(), self.num_experts), device=ids.device)
        expert = torch.searchsorted(tile_ends, number, right=True)
        known = expert.clamp(max=self.num_experts - 1)
        first = (ends - counts)[known] + (number - (tile_ends - tiles)[known]) * MAX_ROWS
        count = (ends[known] - first).clamp(max=MAX_ROWS)
        return order, first, count, torch.where(expert < self.num_experts, expert, -1)

    def _tile(self, loader: TileLoader, rows: int, out_features: int, in_features: int) -> SkinnyTile:
        bits = loader.bits_per_weight(in_features, self.num_experts * out_features)
        return skinny_tile(rows, out_features, in_features, self.launch.num_sms, bits)

    def _constants(self, loader: TileLoader, tile: SkinnyTile) -> dict[str, Any]:
        return {
            "GROUP_SIZE": loader.group_size,
            "LOAD_TILE": loader.load_tile,
            "UNPACK_TILE": loader.unpack_tile,
            "TILE_SCALE": loader.tile_scale,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            **self.launch.options(tile.num_warps, tile.num_stages),
        }


def _tensors(loader: TileLoader) -> tuple[Tensor | None, ...]:
    return (loader.weight, loader.scale, loader.zero, loader.channel_scale, loader.bias)
