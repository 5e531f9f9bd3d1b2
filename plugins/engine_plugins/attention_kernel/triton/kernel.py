"""The plugin: plans the launches of a step on the host and runs them for each layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
from torch import Tensor

from engine.contracts.attention_kernel import AttentionBatch, AttentionCapabilities, LayerCache
from engine.contracts.config import SlotConfig
from engine.contracts.kv_format import KVFormat
from engine.contracts.ops import Attention
from engine.contracts.provider import BuildContext
from engine.kernels.storage import stored_tensors
from engine.kernels.triton.device import has_dependent_launch
from engine_plugins.attention_kernel.config import TRITON_CAPABILITY, TRITON_HEAD_DIMS, beyond_triton_heads
from engine_plugins.attention_kernel.triton.decode import split_attention
from engine_plugins.attention_kernel.triton.planning import (
    LARGEST_SPLIT_TILE,
    TileShape,
    Work,
    merge_shape,
    num_splits,
    plan_work,
    scratch_rows,
    scratch_tiles,
    split_blocks,
    tile_shape,
)
from engine_plugins.attention_kernel.triton.prefill import chunk_attention


@dataclass(frozen=True, slots=True)
class PreparedWork:
    """A launch whose list of query tiles, int32 ``[n, 2]``, is on the device."""

    work: Work
    tiles: Tensor


@dataclass(frozen=True, slots=True)
class Kind:
    """Layers that share a step's query tiles."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    latent: bool

    @staticmethod
    def of(op: Attention) -> Kind:
        return Kind(op.num_heads, op.num_kv_heads, op.head_dim, op.value_dim is not None)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A step's launches, planned for each kind of layers when its first one asks: what heads a rank has the model does
    not tell. Owns what the kernels read: keep it as long as a graph captured from it."""

    batch: AttentionBatch
    works: dict[Kind, tuple[PreparedWork, ...]] = field(default_factory=dict)


class TritonAttention:
    """Paged attention for CUDA devices of compute capability 8.0 and later.

    Scratch memory and arrival counters are allocated once and shared by all layers and captured graphs, so calls must
    be ordered by one stream. ``num_sms`` overrides the number of multiprocessors the launches are shaped for.

    Raises ``RuntimeError`` on a device Triton cannot run on, and for heads of sizes that no tile has.
    """

    capabilities = AttentionCapabilities(
        head_dims=TRITON_HEAD_DIMS,
        dtypes=("float32", "bfloat16", "float16"),
        window=True,
        soft_cap=True,
        max_verify_width=32,
        capturable=True,
        chunk=True,
        sinks=True,
        latent=True,
    )

    def __init__(self, config: SlotConfig, context: BuildContext, *, num_sms: int | None = None) -> None:
        interpreted = bool(triton.knobs.runtime.interpret)
        _check_device(context, interpreted)
        if reasons := beyond_triton_heads(context.model.attentions):
            raise RuntimeError(f"attention_kernel=triton: {'; '.join(reasons)} (choose attention_kernel=torch)")
        # Interpreted kernels (TRITON_INTERPRET=1) run on the CPU; a "device" of 4 multiprocessors keeps grids small.
        self._device = torch.device("cpu" if interpreted else "cuda")
        if num_sms is None:
            num_sms = 4 if interpreted else torch.cuda.get_device_properties(self._device).multi_processor_count
        self._num_sms = num_sms
        self._capability = None if interpreted else torch.cuda.get_device_capability(self._device)
        self._itemsize = getattr(torch, context.dtype).itemsize
        rows, floats = scratch_rows(num_sms), max(self._part_floats(op) for op in context.model.attentions)
        self._parts = torch.empty(rows * floats // LARGEST_SPLIT_TILE, dtype=torch.float32, device=self._device)
        self._lse = torch.empty(rows, dtype=torch.float32, device=self._device)
        self._arrived = torch.zeros(scratch_tiles(num_sms), dtype=torch.int32, device=self._device)
        self._pdl = has_dependent_launch(self._device.type)
        self._decode_tiles: dict[tuple[int, int], Tensor] = {}

    def label(self, op: Attention, dtype: str, kv_format: KVFormat) -> str:
        stored = "" if kv_format.scale == "none" else f", {kv_format.storage_dtype(dtype)} keys and values"
        return f"Triton split-KV (merged in the kernel), FA2-style prefill{stored}"

    def prepare(self, batch: AttentionBatch) -> Prepared:
        """See :meth:`launches`."""
        return Prepared(batch)

    def launches(self, prepared: Prepared, op: Attention) -> tuple[PreparedWork, ...]:
        """Those of this batch, for a layer. See :func:`plan_work`; they depend on the batch's shape, not its contexts.
        Where a layer is captured, layers of its kind have run before."""
        kind, batch = Kind.of(op), prepared.batch
        if kind not in prepared.works:
            works = plan_work(
                batch.q_lens, batch.kv_lens, group=op.num_heads // op.num_kv_heads, num_kv_heads=op.num_kv_heads,
                head_dim=op.head_dim, itemsize=self._itemsize, num_sms=self._num_sms, latent=kind.latent,
            )  # fmt: skip
            prepared.works[kind] = tuple(PreparedWork(work, self._tile_list(work)) for work in works)
        return prepared.works[kind]

    def _part_floats(self, op: Attention) -> int:
        """Sums that the largest query tile leaves behind."""
        block_m = split_blocks(self._itemsize, op.value_dim is not None)[-1]
        return block_m * tile_shape(True, block_m, op.head_dim, self._itemsize, op.value_dim).block_d

    def forward(
        self, prepared: Prepared, op: Attention, q: Tensor, cache: LayerCache, sinks: Tensor | None = None
    ) -> Tensor:
        """See :meth:`engine.contracts.attention_kernel.SinkAttention.forward`."""
        return self._attend(prepared, op, q, cache, sinks, None)

    def forward_lse(self, prepared: Prepared, op: Attention, q: Tensor, cache: LayerCache) -> tuple[Tensor, Tensor]:
        """See :class:`engine.contracts.attention_kernel.LogSumExpAttention`."""
        assert op.window is None and op.chunk is None and not op.sinks
        sums = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        return self._attend(prepared, op, q, cache, None, sums), sums

    def _attend(
        self, prepared: Prepared, op: Attention, q: Tensor, cache: LayerCache, sinks: Tensor | None, sums: Tensor | None
    ) -> Tensor:
        """``sums``: where the log-sum-exp goes, if it is wanted."""
        assert q.stride(-1) == 1 and cache.k.stride(-1) == 1 and cache.k.stride() == cache.v.stride()
        out = torch.empty(*q.shape[:2], op.out_dim, dtype=q.dtype, device=q.device)
        call = _Call(prepared.batch, op, q, cache, sinks, out, sums, self._pdl)
        for item in self.launches(prepared, op):
            work = item.work
            sizes = work.block_m, op.head_dim, q.element_size(), op.value_dim
            shape = tile_shape(work.split, *sizes, self._capability)
            if work.split:
                self._split(call, item, shape)
            else:
                grid = (op.num_kv_heads, len(work.tiles))
                chunk_attention[grid](*call.tensors(item.tiles), *call.numbers(), **call.constants(shape))
        return out.view(q.shape[0], -1)

    def _split(self, call: _Call, item: PreparedWork, shape: TileShape) -> None:
        programs = len(item.work.tiles) * call.op.num_kv_heads
        splits = num_splits(programs, self._num_sms, item.work.queries)
        rows = programs * splits * shape.block_m
        assert splits == 1 or (rows <= self._lse.numel() and rows * shape.block_d <= self._parts.numel())
        assert splits == 1 or programs <= self._arrived.numel()
        lanes, merge_m = merge_shape(splits, shape.block_m, shape.block_d)
        tensors = call.tensors(item.tiles)
        split_attention[(programs, splits)](
            *tensors[:8], self._parts, self._lse, self._arrived, *tensors[8:], splits, *call.numbers(),
            SPLIT=splits > 1, LANES=lanes, MERGE_M=merge_m, **call.constants(shape),
        )  # fmt: skip

    def _tile_list(self, work: Work) -> Tensor:
        """The tile list on the device. Those of batches with one tile per row recur in every decode step and are
        kept (at most one per query tile size and number of rows)."""
        one_per_row = work.split and all(tile == (row, 0) for row, tile in enumerate(work.tiles))
        key = (work.block_m, len(work.tiles))
        if one_per_row and key in self._decode_tiles:
            return self._decode_tiles[key]
        tiles = torch.tensor(work.tiles, dtype=torch.int32)
        if self._device.type == "cuda":
            tiles = tiles.pin_memory().to(self._device, non_blocking=True)
        if one_per_row:
            self._decode_tiles[key] = tiles
        return tiles


@dataclass(frozen=True, slots=True)
class _Call:
    """One layer's arguments, in the order in which the kernels take them."""

    batch: AttentionBatch
    op: Attention
    q: Tensor
    cache: LayerCache
    sinks: Tensor | None
    out: Tensor
    sums: Tensor | None
    pdl: bool

    def tensors(self, tiles: Tensor) -> tuple[Tensor | None, ...]:
        batch = self.batch
        k, v, k_scale, v_scale = stored_tensors(self.cache)
        return (
            self.q, k, v if self.op.value_dim is None else None, k_scale, v_scale, self.sinks, self.out, self.sums,
            tiles, batch.block_tables, batch.q_starts, batch.kv_lens_device, batch.key_ends,
        )  # fmt: skip

    def numbers(self) -> tuple[int | float, ...]:
        q, out, keys, op = self.q, self.out, self.cache.k, self.op
        return (
            self.batch.block_tables.stride(0), op.chunk or op.window or 0,
            q.stride(0), q.stride(1), out.stride(0), out.stride(1), *keys.stride()[:3],
            op.scale, op.soft_cap or 1.0,
        )  # fmt: skip

    def constants(self, shape: TileShape) -> dict[str, object]:
        op = self.op
        # Only where the kernels wait for their predecessor may they be launched before it ends.
        early = {"launch_pdl": True} if self.pdl else {}
        return {
            **early,
            "PDL": self.pdl,
            "GROUP": op.num_heads // op.num_kv_heads,
            "NUM_KV_HEADS": op.num_kv_heads,
            "HEAD_DIM": op.head_dim,
            "VALUE_DIM": op.out_dim,
            "BLOCK_SIZE": self.batch.block_size,
            "BLOCK_M": shape.block_m,
            "BLOCK_N": shape.block_n,
            "BLOCK_D": shape.block_d,
            "BLOCK_R": shape.block_r,
            "REACH": "chunk" if op.chunk else "window" if op.window else "full",
            "HAS_CAP": op.soft_cap is not None,
            "SCALE": self.cache.format.scale,
            "LOAD_TILE": self.cache.format.load_tile(),
            **shape.options,
            # The default changes between Triton releases; fused multiply-add is wanted in either.
            "enable_fp_fusion": True,
        }


def _check_device(context: BuildContext, interpreted: bool) -> None:
    device = context.device
    if interpreted:
        return
    if device.kind != "cuda" or not torch.cuda.is_available():
        raise RuntimeError(
            f"attention_kernel=triton on device={device.kind}: expected a CUDA device "
            "(on a CPU choose attention_kernel=torch)"
        )
    if device.capability is not None and device.capability < TRITON_CAPABILITY:
        found = ".".join(map(str, device.capability))
        raise RuntimeError(
            f"attention_kernel=triton on {device.name or 'this GPU'} with compute capability {found}: expected "
            "8.0 or later (choose attention_kernel=torch)"
        )
