"""Mixtures of experts as launches: pairs of a token and an expert one by one, or sorted by expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from engine.contracts.ops import Gated, HeldExperts
from engine.contracts.quantizer import TileLoader
from engine.kernels.triton.experts import expert_down, expert_gate, expert_mix, mix_rows, sort_pairs
from engine.kernels.triton.launch import Launch, NormWeight
from engine.kernels.triton.tiles import GROUPED_ROWS, MAX_ROWS, SkinnyTile, grouped_tile, mix_tile, skinny_tile

SORTED_BY_KERNEL = 4096
"""Pairs up to which one kernel that compares each with all others takes less time than the launches of a sort."""


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
    gated: Gated
    weighs_inputs: bool = False
    held: HeldExperts | None = None
    """Of the experts that ranks share out, this rank's: ids are then its own, or -1."""

    def __call__(
        self, x: Tensor, ids: Tensor, shares: Tensor, residual: Tensor | None, overwrite: bool,
        norm: NormWeight | None = None,
    ) -> Tensor:  # fmt: skip
        """``[num_tokens, out]``: the mixture, added to ``residual`` if there is one, in its memory with ``overwrite``.
        ``x`` is normed first if there is a ``norm``.

        ``ids``: int64, ``shares``: float32, ``[num_tokens, top_k]``. Nothing is read on the host: launches follow from
        shapes alone, however many pairs are this rank's."""
        if self.weighs_inputs:  # a row for each pair
            assert norm is None, "a norm would undo the weights"
            x, shares = (x[:, None] * shares[..., None]).to(x.dtype).flatten(0, 1), torch.ones_like(shares)
        if ids.numel() * 4 <= self._of_all_ranks or ids.shape[0] == 1:
            return self._one_by_one(x, ids, shares, residual, overwrite, norm)
        return self._sorted(x, ids, shares, residual, overwrite, norm)

    @property
    def _of_all_ranks(self) -> int:
        """Experts among which pairs are spread."""
        return self.num_experts if self.held is None else self.held.whole

    def _one_by_one(
        self, x: Tensor, ids: Tensor, shares: Tensor, residual: Tensor | None, overwrite: bool, norm: NormWeight | None
    ) -> Tensor:
        """Two launches; experts of two tokens are read twice."""
        pairs, tokens = ids.numel(), ids.shape[0]
        gated = torch.empty(pairs, self.size, dtype=x.dtype, device=x.device)
        tile = self._tile(self.gate_up, 1, 2 * self.size, self.in_features)
        expert_gate[(pairs, tile.programs(2 * self.size))](
            x, norm and norm.weight, None, None, ids, *_tensors(self.gate_up), gated,
            x.stride(0), 1 if self.weighs_inputs else self.top_k, norm.eps if norm else 0.0,
            IN_FEATURES=self.in_features, SIZE=self.size, **self._activation(), **self._constants(self.gate_up, tile),
        )  # fmt: skip
        out = residual if overwrite and residual is not None else x.new_empty(tokens, self.out_features)
        tile = mix_tile(self.top_k, self.size, self._bits(self.down, self.out_features, self.size))
        constants = self._constants(self.down, tile)
        constants["BLOCK_P"] = constants.pop("BLOCK_M")
        expert_mix[(tokens, tile.programs(self.out_features))](
            gated, ids, shares, *_tensors(self.down), residual, out,
            TOP_K=self.top_k, IN_FEATURES=self.size, OUT_FEATURES=self.out_features, SOME=self.held is not None,
            **constants,
        )  # fmt: skip
        return out

    def _sorted(
        self, x: Tensor, ids: Tensor, shares: Tensor, residual: Tensor | None, overwrite: bool, norm: NormWeight | None
    ) -> Tensor:
        """Five launches, of few pairs; an expert is read once for each of its tiles."""
        pairs, tall = ids.numel(), self._tile_rows(x, ids)
        order, token, first, count, expert = self._tiles(ids, tall)
        rows, tiles = x.index_select(0, order if self.weighs_inputs else token), expert.numel()
        gated = torch.empty(pairs, self.size, dtype=x.dtype, device=x.device)
        tile = self._tile(self.gate_up, tall, 2 * self.size, self.in_features)
        expert_gate[(tiles, tile.programs(2 * self.size))](
            rows, norm and norm.weight, first, count, expert, *_tensors(self.gate_up), gated,
            rows.stride(0), 1, norm.eps if norm else 0.0,
            IN_FEATURES=self.in_features, SIZE=self.size, **self._activation(), **self._constants(self.gate_up, tile),
        )  # fmt: skip
        made = torch.empty(pairs, self.out_features, dtype=torch.float32, device=x.device)
        tile = self._tile(self.down, tall, self.out_features, self.size)
        expert_down[(tiles, tile.programs(self.out_features))](
            gated, order, first, count, expert, *_tensors(self.down), made,
            IN_FEATURES=self.size, OUT_FEATURES=self.out_features, **self._constants(self.down, tile),
        )  # fmt: skip
        out = residual if overwrite and residual is not None else x.new_empty(ids.shape[0], self.out_features)
        block = min(1024, triton.next_power_of_2(self.out_features))
        mix_rows[(ids.shape[0], triton.cdiv(self.out_features, block))](
            made, None if self.held is None else ids, shares, residual, out,
            TOP_K=self.top_k, OUT_FEATURES=self.out_features, BLOCK=block, **self.launch.options(4),
        )  # fmt: skip
        return out

    def _tile_rows(self, x: Tensor, ids: Tensor) -> int:
        """Pairs of a tile: many where most experts fill half of such a tile."""
        many = x.element_size() <= 2 and 2 * ids.numel() >= GROUPED_ROWS * self._of_all_ranks
        return GROUPED_ROWS if many else MAX_ROWS

    def _tiles(self, ids: Tensor, tall: int = MAX_ROWS) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """See :func:`~engine.kernels.triton.experts.sort_pairs`; ``tall``: most pairs of a tile."""
        pairs = ids.numel()
        num_tiles = pairs // tall + min(pairs, self.num_experts)
        if pairs > SORTED_BY_KERNEL:
            return self._tiles_by_torch(ids.flatten(), num_tiles, tall)
        order, token = torch.empty(2, pairs, dtype=torch.int64, device=ids.device)
        first, count, expert = torch.empty(3, num_tiles, dtype=torch.int64, device=ids.device)
        block = 64
        sort_pairs[(1 + triton.cdiv(pairs, block),)](
            ids, order, token, first, count, expert, pairs, num_tiles, NUM_EXPERTS=self.num_experts, TOP_K=self.top_k,
            TILE=tall, BLOCK=block, BLOCK_E=triton.next_power_of_2(self.num_experts), **self.launch.options(4),
        )  # fmt: skip
        return order, token, first, count, expert

    def _tiles_by_torch(self, flat: Tensor, num_tiles: int, tall: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        if self.held is not None:
            flat = torch.where(flat < 0, self.num_experts, flat)  # those of other ranks come last
        order = flat.argsort(stable=True)
        counts = torch.zeros(self.num_experts + 1, dtype=torch.int64, device=flat.device)
        counts = counts.scatter_add_(0, flat, torch.ones_like(flat))[:-1]
        ends, tiles = counts.cumsum(0), (counts + tall - 1) // tall
        tile_ends = tiles.cumsum(0)
        number = torch.arange(num_tiles, device=flat.device)
        expert = torch.searchsorted(tile_ends, number, right=True)
        known = expert.clamp(max=self.num_experts - 1)
        first = (ends - counts)[known] + (number - (tile_ends - tiles)[known]) * tall
        count = (ends[known] - first).clamp(max=tall)
        return order, order // self.top_k, first, count, torch.where(expert < self.num_experts, expert, -1)

    def _activation(self) -> dict[str, Any]:
        op = self.gated
        return {"ACT": op.act, "LIMIT": op.limit, "ALPHA": op.alpha, "OFFSET": op.offset}

    def _tile(self, loader: TileLoader, rows: int, out_features: int, in_features: int) -> SkinnyTile:
        if rows > MAX_ROWS:
            return grouped_tile(in_features)
        bits = self._bits(loader, out_features, in_features)
        return skinny_tile(rows, out_features, in_features, self.launch.num_sms, bits)

    def _bits(self, loader: TileLoader, out_features: int, in_features: int) -> int:
        return loader.bits_per_weight(in_features, self.num_experts * out_features)

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
