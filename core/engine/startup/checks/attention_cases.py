"""Batches of odd shapes for attention kernels: what a kernel is tried with at start, and what its suite runs."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.contracts.attention_kernel import AttentionBatch, LayerCache
from engine.contracts.graph import KVSpec, TokenShare
from engine.contracts.kv_format import KVFormat
from engine.contracts.ops import Attention
from engine.kernels.storage import stored_tensors
from engine.kv.cache import KVCache
from engine.kv.groups import cache_groups
from engine.step.tables import BlockShare

WIDEST = 4096
"""Tokens of a window or a chunk up to which a row at start is longer than it."""


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One batch shape. ``rows``: ``(q_len, kv_len)`` per sequence."""

    name: str
    rows: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 8
    window: int | None = None
    soft_cap: float | None = None
    scale: float | None = None
    """``None``: ``head_dim ** -0.5``."""
    chunk: int | None = None
    value_dim: int | None = None
    """Of latent attention, which has one key-value head."""
    sinks: bool = False

    @property
    def op(self) -> Attention:
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        heads = (self.num_heads, self.num_kv_heads, self.head_dim)
        return Attention(*heads, scale, self.window, self.soft_cap, self.value_dim, self.sinks, self.chunk)


def _block_borders(block_size: int) -> tuple[tuple[int, int], ...]:
    return tuple((1, block_size + d) for d in (-1, 0, 1)) + tuple((2, 3 * block_size + d) for d in (-1, 0, 1))


SMALL_CASES: tuple[AttentionCase, ...] = (
    AttentionCase("one_token", ((1, 1),)),
    AttentionCase("decode_at_block_borders", _block_borders(8)),
    AttentionCase("decode_blocks_of_16", _block_borders(16), block_size=16),
    AttentionCase("decode_blocks_of_256", ((1, 255), (1, 256), (1, 257)), block_size=256),
    AttentionCase("decode_of_very_unequal_lengths", ((1, 1), (1, 301), (1, 64), (1, 65))),
    AttentionCase("verify", ((5, 70), (3, 3), (5, 129))),
    AttentionCase("verify_wide", ((17, 90), (33, 40))),
    AttentionCase("whole_prompt", ((37, 37),)),
    AttentionCase("prompt_chunk", ((23, 150),)),
    AttentionCase("prefill_decode_verify", ((1, 40), (29, 29), (4, 66), (1, 1), (20, 100))),
    AttentionCase("chunk_with_history", ((70, 200),)),
    AttentionCase("chunk_window", ((70, 131), (1, 8)), window=20),
    AttentionCase("chunk_soft_cap", ((66, 90),), soft_cap=3.0),
    AttentionCase("group_1", ((1, 33), (6, 20)), num_heads=3, num_kv_heads=3),
    AttentionCase("group_3", ((1, 33), (6, 20), (9, 9)), num_heads=6, num_kv_heads=2),
    AttentionCase("group_7", ((1, 33), (6, 20)), num_heads=14, num_kv_heads=2),
    AttentionCase("group_16", ((1, 33), (6, 20)), num_heads=16, num_kv_heads=1),
    AttentionCase("head_dim_64", ((1, 50), (7, 21)), head_dim=64),
    AttentionCase("head_dim_80", ((1, 50), (7, 21)), head_dim=80),
    AttentionCase("head_dim_96", ((1, 50), (7, 21)), head_dim=96),
    AttentionCase("head_dim_128", ((1, 50), (7, 21)), head_dim=128, block_size=64),
    AttentionCase("head_dim_256", ((1, 50), (7, 21)), head_dim=256, block_size=32),
    AttentionCase("window", ((1, 100), (6, 90), (30, 30), (25, 120)), window=13),
    AttentionCase("window_of_one", ((1, 9), (5, 17)), window=1),
    AttentionCase("window_wider_than_context", ((1, 20), (8, 8)), window=4096),
    AttentionCase("soft_cap", ((1, 70), (6, 30)), soft_cap=2.0),
    AttentionCase("scale", ((1, 40), (6, 29), (34, 34)), scale=0.4),
    AttentionCase("soft_cap_and_window", ((1, 70), (26, 40)), soft_cap=30.0, window=16, scale=1.0),
    AttentionCase("chunked", ((1, 26), (1, 27), (6, 80), (30, 30), (70, 131)), chunk=13),
    AttentionCase("chunked_by_blocks", ((1, 32), (1, 33), (5, 35), (40, 64)), chunk=16, soft_cap=30.0),
    AttentionCase("sinks", ((1, 1), (1, 100), (5, 70), (30, 30), (40, 120)), sinks=True),
    AttentionCase("sinks_and_window", ((1, 100), (6, 90), (25, 120)), num_heads=8, window=13, sinks=True),
    AttentionCase("sinks_and_soft_cap", ((1, 40), (66, 90)), soft_cap=3.0, sinks=True),
    AttentionCase("latent", ((1, 1), (5, 40), (9, 9)), 8, 1, 40, value_dim=32),
    AttentionCase("latent_chunk", ((34, 60), (1, 33)), 4, 1, 24, value_dim=16),
    AttentionCase("latent_of_whole_keys", ((1, 50), (7, 21)), 6, 1, 32, value_dim=32),
    AttentionCase("latent_window_and_sinks", ((1, 50), (6, 30)), 8, 1, 40, window=13, value_dim=24, sinks=True),
    AttentionCase("latent_of_576", ((1, 33), (2, 20)), 16, 1, 576, value_dim=512, block_size=16),
)
"""Small enough for an interpreter; every case can fail in its own way."""

AT_START = ("prefill_decode_verify", "decode_of_very_unequal_lengths")
"""Rows of these are tried at start: chunks, drafts, decodes at the borders of blocks, and one of many blocks."""


def case_at_start(op: Attention, block_size: int, max_len: int) -> AttentionCase:
    """A batch of every kind of row, for an op of a model whose requests have at most ``max_len`` tokens."""
    rows = [row for case in SMALL_CASES if case.name in AT_START for row in case.rows]
    if op.window is not None and op.window <= WIDEST:
        rows.append((2, op.window + 3))
    if op.chunk is not None and op.chunk <= WIDEST:  # drafts across a border, and what begins a chunk
        rows += [(3, op.chunk + 2), (1, op.chunk + 1)]
    return AttentionCase(
        "at_start", tuple((min(q_len, max_len), min(kv_len, max_len)) for q_len, kv_len in rows),
        op.num_heads, op.num_kv_heads, op.head_dim, block_size,
        op.window, op.soft_cap, op.scale, op.chunk, op.value_dim, op.sinks,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Tensors of a case, as :meth:`AttentionKernel.forward` takes them."""

    batch: AttentionBatch
    q: Tensor
    cache: LayerCache
    sinks: Tensor | None = None

    @property
    def more(self) -> tuple[Tensor, ...]:
        """What a kernel is given beside queries and cache."""
        return () if self.sinks is None else (self.sinks,)

    def with_bounds(self, further: int) -> AttentionInputs:
        """Lengths on the host are that much too large, as while drafts are verified."""
        bounds = tuple(kv_len + further for kv_len in self.batch.kv_lens)
        return replace(self, batch=replace(self.batch, kv_lens=bounds))

    def in_projection(self, num_kv_heads: int, beside: float) -> AttentionInputs:
        """Queries lie among keys and values, as the core has them; these are all ``beside``."""
        tokens, heads, dim = self.q.shape
        fused = self.q.new_full((tokens, heads + 2 * num_kv_heads, dim), beside)
        fused[:, :heads] = self.q
        return replace(self, q=fused[:, :heads])


def make_inputs(
    case: AttentionCase,
    dtype: str,
    device: str,
    kv_format: KVFormat,
    padding_rows: int = 0,
    tables_of: AttentionCase | None = None,
    poisoned: bool = True,
) -> AttentionInputs:
    """Random inputs, the same on every machine. ``padding_rows`` rows of no queries follow, as in a captured graph.
    ``tables_of``: a case with the same rows, whose blocks they lie in; ``poisoned``: the cache has NaN where nothing
    was written.

    Blocks of a row are scattered over the cache; block 0 belongs to nobody.
    """
    generator, size = _generator(case), case.block_size
    counts = [-(-kv_len // size) for _, kv_len in case.rows]
    order = torch.split(torch.randperm(sum(counts), generator=_generator(tables_of or case)) + 1, counts)
    tables = torch.zeros(len(case.rows) + padding_rows, max(counts) + 1, dtype=torch.int32)
    for table, blocks in zip(tables, order):
        table[: len(blocks)] = blocks
    tokens = [torch.arange(kv_len) for _, kv_len in case.rows]
    slots = torch.cat([blocks[at // size] * size + at % size for blocks, at in zip(order, tokens)])

    def drawn(tokens: int, heads: int) -> Tensor:
        found = torch.randn(tokens, heads, case.head_dim, generator=generator)
        return found.to(device, getattr(torch, dtype))

    groups = cache_groups([KVSpec(case.num_kv_heads, case.head_dim, value_dim=case.value_dim)])
    kv = KVCache(groups, kv_format, [sum(counts) + 1], size, dtype, device)
    if poisoned:
        _poison(kv.layers[0])
    of_keys, of_values = (torch.linspace(*ends, case.num_kv_heads) for ends in ((0.02, 0.03), (0.05, 0.025)))
    kv.set_scales(0, of_keys, of_values if case.value_dim is None else of_keys)
    k = drawn(len(slots), case.num_kv_heads)
    kv.write(0, slots.to(device), k, drawn(*k.shape[:2]) if case.value_dim is None else None)
    q_lens = [q_len for q_len, _ in case.rows] + [0] * padding_rows
    kv_lens = [kv_len for _, kv_len in case.rows] + [0] * padding_rows
    batch = AttentionBatch(
        q_lens=tuple(q_lens),
        kv_lens=tuple(kv_lens),
        block_tables=tables.to(device),
        q_starts=torch.tensor([0, *q_lens]).cumsum(0).to(device, torch.int32),
        kv_lens_device=torch.tensor(kv_lens, dtype=torch.int32, device=device),
        block_size=size,
    )
    # Sinks that weigh little, about as much as all keys, and more.
    sinks = torch.linspace(-2.0, 6.0, case.num_heads, device=device) if case.sinks else None
    return AttentionInputs(batch, drawn(sum(q_lens), case.num_heads), kv.layers[0], sinks)


def _generator(case: AttentionCase) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(case.name.encode()))


def _poison(cache: LayerCache) -> None:
    """All that a query might read by mistake; scales of whole layers are no such thing."""
    for own in stored_tensors(cache):
        if own is not None and own.dim() > 1:
            own.fill_(float("nan") if own.dtype.is_floating_point else torch.iinfo(own.dtype).max)


def of_rank(case: AttentionCase, inputs: AttentionInputs, ranks: int, index: int) -> AttentionInputs:
    """The same queries where ``ranks`` share out the tokens of every row: how many keys the ``index``-th has. Which
    keys these are does not matter: they are the first ones of each row."""
    share, batch = BlockShare.of(TokenShare(ranks, index), ranks * case.block_size), inputs.batch
    ends = [kv_len - q_len + j + 1 for q_len, kv_len in case.rows for j in range(q_len)]
    own = share.length(batch.kv_lens_device.long()).int()
    shared = replace(
        batch,
        kv_lens=tuple(share.most(kv_len) for kv_len in batch.kv_lens),
        kv_lens_device=own,
        key_ends=share.length(torch.tensor(ends)).to(own),
    )
    return replace(inputs, batch=shared)
