"""Attention over the paged cache in plain torch, on any device.

A step is cut into *pieces*, each one call of ``scaled_dot_product_attention``. What a piece needs besides queries,
keys and values (which slots it reads, its mask) is worked out once per step and shared by all layers that have the
same window or chunk. ``engine.kernels.torch.reference.paged_attention`` is the plain version this one is tested
against.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contracts.attention_kernel import AttentionBatch, AttentionCapabilities, LayerCache
from engine.contracts.config import SlotConfig
from engine.contracts.kv_format import KVFormat
from engine.contracts.ops import Attention
from engine.contracts.provider import BuildContext
from engine.kernels.storage import as_bits
from engine.kernels.torch.reference import soft_capped

QUERY_CHUNK = 256
"""Queries per piece where a mask is needed: bounds the mask, and keys beyond the chunk's last query are not read."""
FOLD_LIMIT = 32
"""Up to this many queries per row, the heads that share a KV head become queries of it, so that it is read once."""
CALL_KEYS = 2048
"""Rows of different lengths share a call while their padding stays below this many keys, which take about as long to
gather and to attend to as another call takes to start."""


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of the step as layers with one window or chunk see it."""

    index: int
    query: int
    """First query token in the step."""
    num_queries: int
    first_key: int
    """First key position any of its queries sees."""
    num_keys: int
    """Keys from ``first_key`` to the end."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One call: ``rows`` sequences with ``num_queries`` queries and (padded) ``num_keys`` keys each."""

    rows: int
    num_queries: int
    num_keys: int
    query: int | Tensor
    """First query token, or int64 ``[rows * num_queries]``."""
    keys: int | Tensor
    """First cache slot of a contiguous run, or int64 slots ``[rows * num_keys]``."""
    causal: bool
    """Plain causal mask, which the kernel itself knows."""
    mask: Tensor | None
    """Added to the scores, in the compute dtype: ``[rows or 1, 1, num_queries, num_keys]``."""


@dataclass(slots=True)
class Prepared:
    """A step's rows, and the pieces of the windows and chunks met so far."""

    batch: AttentionBatch
    key_ends: list[int] | None = None
    """By query, where ranks share out tokens."""
    pieces: dict[tuple[int | None, int | None, bool, torch.dtype], tuple[Piece, ...]] = field(default_factory=dict)


class TorchAttention:
    """See :class:`engine.contracts.attention_kernel.AttentionKernel`."""

    capabilities = AttentionCapabilities(
        head_dims=None,
        dtypes=("float32", "bfloat16", "float16"),
        window=True,
        soft_cap=True,
        max_verify_width=1 << 30,
        capturable=False,
        sinks=True,
        latent=True,
        chunk=True,
    )

    def __init__(self, config: SlotConfig, context: BuildContext) -> None:
        pass

    def label(self, op: Attention, dtype: str, kv_format: KVFormat) -> str:
        return "TorchAttention"

    def prepare(self, batch: AttentionBatch) -> Prepared:
        # What is known on the host are bounds while drafts are verified. A GPU is waited for, once per step.
        key_ends = None if batch.key_ends is None else batch.key_ends.tolist()
        return Prepared(replace(batch, kv_lens=tuple(batch.kv_lens_device.tolist())), key_ends)

    def forward(
        self, prepared: Prepared, op: Attention, q: Tensor, cache: LayerCache, sinks: Tensor | None = None
    ) -> Tensor:
        """See the contract. Pieces are made when the first layer asks for them."""
        capped = _by_scores(op)
        key = (op.window, op.chunk, capped, q.dtype)
        pieces = prepared.pieces.get(key)
        if pieces is None:
            pieces = prepared.pieces[key] = make_pieces(prepared.batch, op, q.dtype, not capped)
        if len(pieces) == 1 and isinstance(pieces[0].query, int):
            return _attend(pieces[0], op, q, cache, sinks)
        out = q.new_empty(q.shape[0], op.num_heads * op.out_dim)
        for piece in pieces:
            if isinstance(piece.query, int):
                stop = piece.query + piece.rows * piece.num_queries
                out[piece.query : stop] = _attend(piece, op, q[piece.query : stop], cache, sinks)
            else:
                out.index_copy_(0, piece.query, _attend(piece, op, q[piece.query], cache, sinks))
        return out

    def forward_lse(self, prepared: Prepared, op: Attention, q: Tensor, cache: LayerCache) -> tuple[Tensor, Tensor]:
        """See :class:`engine.contracts.attention_kernel.LogSumExpAttention`."""
        key = (None, None, True, q.dtype)
        pieces = prepared.pieces.get(key)
        if pieces is None:
            ends = prepared.key_ends
            pieces = prepared.pieces[key] = make_pieces(prepared.batch, op, q.dtype, False, ends)
        out = q.new_zeros(q.shape[0], op.num_heads * op.out_dim)
        lse = torch.full((q.shape[0], op.num_heads), float("-inf"), device=q.device)
        for piece in pieces:
            index = piece.query
            if isinstance(index, int):
                index = torch.arange(index, index + piece.rows * piece.num_queries, device=q.device)
            found, sums = _attend_lse(piece, op, q[index], cache)
            out.index_copy_(0, index, found.to(q.dtype))
            lse.index_copy_(0, index, sums)
        return out, lse


def _read(piece: Piece, stored: Tensor, scale: Tensor | None, kv_format: KVFormat, dtype: torch.dtype) -> Tensor:
    """Keys or values: ``[rows, kv_heads, num_keys, head_dim]`` in ``dtype``; a view of the cache where slots are
    contiguous."""
    if scale is None and isinstance(piece.keys, int):
        return kv_format.unpack(_run(stored, piece.keys, piece.num_keys), None, dtype)
    picked = _pick(stored, piece)
    if scale is not None and scale.dim() > 1:
        scale = _pick(scale, piece)
    plain = kv_format.unpack(picked, scale, dtype)
    return plain.view(piece.rows, piece.num_keys, *plain.shape[1:]).transpose(1, 2)


def _run(stored: Tensor, first_slot: int, num_keys: int) -> Tensor:
    """A contiguous run of slots as ``[1, kv_heads, num_keys, head_dim]``, in one view: views are what a decode step
    on a CPU has most of."""
    _, _, heads, dim = stored.shape
    _, slot, head, _ = stored.stride()
    return stored.as_strided((1, heads, num_keys, dim), (0, head, slot, 1), stored.storage_offset() + first_slot * slot)


def _pick(stored: Tensor, piece: Piece) -> Tensor:
    """``[rows * num_keys, ...]`` of ``stored [num_blocks, block_size, ...]``."""
    slots = stored.flatten(0, 1)
    if isinstance(piece.keys, int):
        return slots.narrow(0, piece.keys, piece.num_keys)
    return as_bits(slots).index_select(0, piece.keys).view(stored.dtype)


def _by_scores(op: Attention) -> bool:
    """Whether torch's own attention lacks something of it."""
    return op.soft_cap is not None or op.sinks


def _attend(piece: Piece, op: Attention, q: Tensor, cache: LayerCache, sinks: Tensor | None) -> Tensor:
    """``q [rows * num_queries, heads, dim]`` -> ``[rows * num_queries, heads * dim]``."""
    k = _read(piece, cache.k, cache.k_scale, cache.format, q.dtype)
    v = _read(piece, cache.v, cache.v_scale, cache.format, q.dtype)
    rows, n, kv_heads, group = piece.rows, piece.num_queries, op.num_kv_heads, op.num_heads // op.num_kv_heads
    mask = piece.mask
    if not _by_scores(op) and n > FOLD_LIMIT:
        q = q.view(rows, n, op.num_heads, op.head_dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=piece.causal, scale=op.scale, enable_gqa=group > 1
        )
        return out.transpose(1, 2).reshape(rows * n, -1)
    if n == 1 and not _by_scores(op):
        q = q.reshape(rows, kv_heads, group, op.head_dim)
        return F.scaled_dot_product_attention(q, k, v, mask, scale=op.scale).view(rows, -1)
    # [rows, n, kv_heads, group, dim] -> [rows, kv_heads, group * n, dim]
    q = q.reshape(rows, n, kv_heads, group, op.head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    if mask is not None and group > 1 and n > 1:
        mask = mask.repeat(1, 1, group, 1)
    if not _by_scores(op):
        out = F.scaled_dot_product_attention(q, k, v, mask, scale=op.scale)
    else:
        # A query's row is that of its head: [kv_heads, group * n].
        of_rows = None if sinks is None else sinks.view(kv_heads, group, 1).expand(-1, -1, n).flatten(1)
        out = _attention_by_scores(q, k, v, mask, op, of_rows)
    out = out.view(rows, kv_heads, group, n, op.out_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(rows * n, -1)


def _attention_by_scores(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, op: Attention, sinks: Tensor | None
) -> Tensor:
    """``q [rows, kv_heads, n, dim]``; ``sinks``: ``[kv_heads, n]``."""
    scores = soft_capped(torch.matmul(q.float(), k.float().transpose(-1, -2)) * op.scale, op.soft_cap)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks[..., None].expand(*scores.shape[:-1], 1)), dim=-1)
    probs = scores.softmax(dim=-1)
    return torch.matmul(probs if sinks is None else probs[..., :-1], v.float()).to(q.dtype)


def _attend_lse(piece: Piece, op: Attention, q: Tensor, cache: LayerCache) -> tuple[Tensor, Tensor]:
    """``q [rows * num_queries, heads, dim]`` -> ``[rows * num_queries, heads * dim]``, and the log-sum-exp of scores,
    float32 ``[rows * num_queries, heads]``."""
    k = _read(piece, cache.k, cache.k_scale, cache.format, q.dtype).float()
    v = _read(piece, cache.v, cache.v_scale, cache.format, q.dtype).float()
    rows, n, kv_heads, group = piece.rows, piece.num_queries, op.num_kv_heads, op.num_heads // op.num_kv_heads
    # [rows, n, kv_heads, group, dim] -> [rows, kv_heads, n * group, dim]
    q = q.float().view(rows, n, kv_heads, group, op.head_dim).transpose(1, 2).flatten(2, 3)
    scores = soft_capped(torch.matmul(q, k.transpose(-1, -2)) * op.scale, op.soft_cap)
    if piece.mask is not None:
        scores += piece.mask.repeat_interleave(group, dim=2)
    sums = scores.logsumexp(dim=-1)
    out = torch.matmul(scores.sub_(sums[..., None]).exp_(), v).view(rows, kv_heads, n, group, op.out_dim)
    lse = sums.view(rows, kv_heads, n, group).transpose(1, 2).reshape(rows * n, op.num_heads)
    return out.transpose(1, 2).reshape(rows * n, -1), lse


def make_pieces(
    batch: AttentionBatch,
    op: Attention,
    dtype: torch.dtype,
    may_be_causal: bool,
    key_ends: Sequence[int] | None = None,
) -> tuple[Piece, ...]:
    """Cut a step into calls: long rows by themselves, short ones batched with rows of about their length. Of ``op``
    matters which keys its queries see.

    ``may_be_causal=False``: every mask is spelled out, for a caller that computes the scores itself. ``key_ends``: as
    :attr:`AttentionBatch.key_ends`.
    """
    planner = _Planner(batch, op, dtype, key_ends)
    pieces: list[Piece] = []
    short: dict[int, list[Row]] = {}
    for row in planner.rows():
        if row.num_queries > FOLD_LIMIT or (row.num_queries > 1 and row.num_queries == row.num_keys):
            pieces += planner.alone(row, may_be_causal)
        else:
            short.setdefault(row.num_queries, []).append(row)
    for rows in short.values():
        for group in _by_length(rows):
            pieces.append(planner.together(group))
    return tuple(pieces)


def _by_length(rows: Sequence[Row]) -> list[list[Row]]:
    """Groups whose padding costs less than a call of their own, longest rows first."""
    groups: list[list[Row]] = []
    padding = 0
    for row in sorted(rows, key=lambda r: -r.num_keys):
        padding += groups[-1][0].num_keys - row.num_keys if groups else 0
        if groups and padding <= CALL_KEYS:
            groups[-1].append(row)
        else:
            groups.append([row])
            padding = 0
    return groups


class _Planner:
    """Slots and masks of one step and one window or chunk."""

    def __init__(
        self, batch: AttentionBatch, op: Attention, dtype: torch.dtype, key_ends: Sequence[int] | None = None
    ) -> None:
        self._batch = batch
        self._key_ends = key_ends
        self._op = op
        self._dtype = dtype
        self._device = batch.block_tables.device
        # On a GPU reading the table would wait for the device; there every piece gathers.
        on_cpu = self._device.type == "cpu"
        self._tables: list[list[int]] | None = batch.block_tables.tolist() if on_cpu else None

    def rows(self) -> list[Row]:
        rows = []
        query = 0
        for index, (q_len, kv_len) in enumerate(zip(self._batch.q_lens, self._batch.kv_lens, strict=True)):
            if q_len == 0:
                continue  # padding of a captured batch
            first = self._first_key(kv_len - q_len)
            if kv_len > first:  # there may be no key on this rank
                rows.append(Row(index, query, q_len, first, kv_len - first))
            query += q_len
        return rows

    def alone(self, row: Row, may_be_causal: bool) -> list[Piece]:
        """A row by itself: in one causal call if nothing lies before it, else in chunks with a mask."""
        end = row.first_key + row.num_keys
        see_alike = self._first_key(end - 1) == row.first_key
        if may_be_causal and row.num_queries == row.num_keys and see_alike and row.num_queries > FOLD_LIMIT:
            return [self._piece(row, None, causal=True)]
        pieces = []
        for start in range(0, row.num_queries, QUERY_CHUNK):
            count = min(QUERY_CHUNK, row.num_queries - start)
            first_query = end - row.num_queries + start
            first, last = self._first_key(first_query), first_query + count
            if self._key_ends is not None:
                last = self._key_ends[row.query + start + count - 1]
                if last == first:
                    continue
            chunk = Row(row.index, row.query + start, count, first, last - first)
            pieces.append(self._piece(chunk, self._mask([chunk], chunk.num_keys), causal=False))
        return pieces

    def together(self, rows: Sequence[Row]) -> Piece:
        """Rows with equally many queries in one call, padded to the longest."""
        first, n = rows[0], rows[0].num_queries
        padded = max(row.num_keys for row in rows)
        same_length = all(row.num_keys == padded for row in rows)
        mask = None if same_length and n == 1 else self._mask(rows, padded)
        if len(rows) == 1:
            return self._piece(first, mask, causal=False)
        in_order = all(row.query == first.query + i * n for i, row in enumerate(rows))
        return Piece(
            rows=len(rows),
            num_queries=n,
            num_keys=padded,
            query=first.query if in_order else self._queries(rows),
            keys=torch.cat([self._slots(row, padded) for row in rows]),
            causal=False,
            mask=mask,
        )

    def _piece(self, row: Row, mask: Tensor | None, causal: bool) -> Piece:
        start = self._run_start(row)
        keys = self._slots(row, row.num_keys) if start is None else start
        return Piece(1, row.num_queries, row.num_keys, row.query, keys, causal, mask)

    def _run_start(self, row: Row) -> int | None:
        """First slot, if the row's blocks follow one another in memory."""
        if self._tables is None:
            return None
        size = self._batch.block_size
        low, high = row.first_key // size, (row.first_key + row.num_keys - 1) // size
        blocks = self._tables[row.index][low : high + 1]
        if blocks != list(range(blocks[0], blocks[0] + len(blocks))):
            return None
        return blocks[0] * size + row.first_key % size

    def _slots(self, row: Row, length: int) -> Tensor:
        """int64 ``[length]``. Padding repeats the row's last key: another request's memory is never read."""
        size = self._batch.block_size
        positions = torch.arange(row.first_key, row.first_key + length, device=self._device)
        positions.clamp_(max=row.first_key + row.num_keys - 1)
        blocks = self._batch.block_tables[row.index].index_select(0, positions // size)
        return blocks.long() * size + positions % size

    def _first_key(self, position: int) -> int:
        return max(0, int(self._op.first_key(position)))

    def _queries(self, rows: Sequence[Row]) -> Tensor:
        index = [row.query + j for row in rows for j in range(row.num_queries)]
        return torch.tensor(index, dtype=torch.int64, device=self._device)

    def _mask(self, rows: Sequence[Row], num_keys: int) -> Tensor | None:
        """``[rows, 1, num_queries, num_keys]``: 0 where a query sees a key, else -inf."""
        spans = [(row.first_key, row.first_key + row.num_keys) for row in rows]
        first, end = torch.tensor(spans, device=self._device)[:, :, None, None, None].unbind(1)
        n = rows[0].num_queries
        key = first + torch.arange(num_keys, device=self._device)
        if self._key_ends is None:
            query = end - n + torch.arange(n, device=self._device)[:, None]  # the last query is the last key
            hidden = (key > query) | (key < self._op.first_key(query))
        else:
            ends = [self._key_ends[row.query : row.query + n] for row in rows]
            hidden = key >= torch.tensor(ends, device=self._device)[:, None, :, None]
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(hidden, float("-inf"))
