"""Attention kernels with a bug each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.contracts.attention_kernel import AttentionBatch, AttentionCapabilities, LayerCache
from engine.contracts.kv_format import KVFormat
from engine.contracts.ops import Attention
from engine.contracts.provider import BuildContext
from engine.kernels.storage import as_bits
from engine.testing.attention_kernel import AttentionKernelConformance, CapturableConformance, LogSumExpConformance
from tests.testing.mutants.mutant import OnPlugin, correct, mutant

EQUALS = "test_equals_the_reference"
STORED = "test_reads_what_a_format_stores"
CAPTURED = "test_a_captured_call_takes_its_lengths_from_the_device"
READS = "test_it_only_reads"
LAYERS = "test_layers_share_what_was_prepared"
SHARED = "test_attends_to_the_keys_of_one_rank"
BATCHES = "test_batches_are_prepared_before_others_ran"


def picked(stored: Tensor, slots: Tensor) -> Tensor:
    """``[n, ...]`` of a cache ``[num_blocks, block_size, ...]``."""
    return as_bits(stored.flatten(0, 1))[slots].view(stored.dtype)


class Plain:
    """One row after another, by the definition: a correct kernel."""

    capabilities = AttentionCapabilities(
        head_dims=None,
        dtypes=("float32", "bfloat16"),
        window=True,
        soft_cap=True,
        max_verify_width=64,
        capturable=False,
        chunk=True,
    )

    def __init__(self, context: BuildContext) -> None:
        pass

    def label(self, op: Attention, dtype: str, kv_format: KVFormat) -> str:
        return "plain"

    def prepare(self, batch: AttentionBatch) -> Any:
        return batch

    def forward(self, prepared: Any, op: Attention, q: Tensor, cache: LayerCache) -> Tensor:
        batch: AttentionBatch = prepared
        outs, first = [], 0
        for row, (q_len, kv_len) in enumerate(zip(batch.q_lens, self.key_counts(batch), strict=True)):
            if q_len:
                k, v = self.read(cache, self.slots(batch, row, kv_len))
                outs.append(self.attend(op, self.queries(q, first, q_len), k, v))
            first += q_len
        return torch.cat(outs).flatten(1).to(q.dtype)

    def key_counts(self, batch: AttentionBatch) -> Sequence[int]:
        counts: list[int] = batch.kv_lens_device.tolist()
        return counts

    def queries(self, q: Tensor, first: int, count: int) -> Tensor:
        return q[first : first + count].float()

    def slots(self, batch: AttentionBatch, row: int, kv_len: int) -> Tensor:
        position = torch.arange(kv_len)
        return batch.block_tables[row, position // batch.block_size].long() * batch.block_size + (
            position % batch.block_size
        )

    def read(self, cache: LayerCache, slots: Tensor) -> tuple[Tensor, Tensor]:
        return self.unpacked(cache, cache.k, cache.k_scale, slots), self.unpacked(cache, cache.v, cache.v_scale, slots)

    def unpacked(self, cache: LayerCache, stored: Tensor, scale: Tensor | None, slots: Tensor) -> Tensor:
        if scale is not None and scale.dim() > 1:
            scale = picked(scale, slots)
        return cache.format.unpack(picked(stored, slots), scale, torch.float32)

    def attend(self, op: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (self.spread(x, op.num_heads // op.num_kv_heads) for x in (k, v))
        hidden = self.hidden(op, len(q), len(k))
        weights = self.scores(op, q, k).masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, self.seen(v, hidden))

    def seen(self, v: Tensor, hidden: Tensor) -> Tensor:
        """Values, and 0 where no query sees them: a block that the window has passed may be another request's."""
        return v.masked_fill(hidden.all(dim=0)[:, None, None], 0.0)

    def spread(self, x: Tensor, group: int) -> Tensor:
        return x.repeat_interleave(group, dim=1)

    def scores(self, op: Attention, q: Tensor, k: Tensor) -> Tensor:
        scores = torch.einsum("qhd,khd->hqk", q, k) * op.scale
        return scores if op.soft_cap is None else op.soft_cap * torch.tanh(scores / op.soft_cap)

    def hidden(self, op: Attention, num_queries: int, num_keys: int) -> Tensor:
        position = torch.arange(num_keys - num_queries, num_keys)[:, None]
        key = torch.arange(num_keys)[None, :]
        return (key > position) | (key < op.first_key(position))


class Captured(Plain):
    """All rows at once, lengths from device tensors: a correct kernel that may be captured."""

    capabilities = replace(Plain.capabilities, capturable=True)

    def forward(self, prepared: Any, op: Attention, q: Tensor, cache: LayerCache) -> Tensor:
        batch: AttentionBatch = prepared
        tables, starts, size = batch.block_tables, batch.q_starts.long(), batch.block_size
        token, key = torch.arange(q.shape[0]), torch.arange(tables.shape[1] * size)
        row = torch.searchsorted(starts[1:].contiguous(), token, right=True)
        count = starts[row + 1] - starts[row]
        position = (self.lengths(batch)[row] - count + token - starts[row])[:, None]
        hidden = (key > position) | (key < op.first_key(position))
        slots = (tables[row][:, key // size].long() * size + key % size).flatten()
        group = op.num_heads // op.num_kv_heads
        keys_and_values = (self.spread(x, group).unflatten(0, hidden.shape) for x in self.read(cache, slots))
        k, v = (torch.where(hidden[..., None, None], 0.0, x) for x in keys_and_values)
        scores = torch.einsum("thd,tkhd->thk", q.float(), k) * op.scale
        if op.soft_cap is not None:
            scores = op.soft_cap * torch.tanh(scores / op.soft_cap)
        weights = scores.masked_fill(hidden[:, None], float("-inf")).softmax(-1)
        return torch.einsum("thk,tkhd->thd", weights, v).flatten(1).to(q.dtype)

    def lengths(self, batch: AttentionBatch) -> Tensor:
        return batch.kv_lens_device.long()


class SharedKeys(Plain):
    """Attends to the keys of one rank, by the definition: a correct kernel."""

    def forward_lse(self, prepared: Any, op: Attention, q: Tensor, cache: LayerCache) -> tuple[Tensor, Tensor]:
        batch: AttentionBatch = prepared
        out = torch.full((q.shape[0], op.num_heads, op.out_dim), float("nan"))
        lse = torch.full((q.shape[0], op.num_heads), float("-inf"))
        rows = [row for row, q_len in enumerate(batch.q_lens) for _ in range(q_len)]
        for query, (row, end) in enumerate(zip(rows, self.ends(batch), strict=True)):
            k, v = self.read(cache, self.slots(batch, row, end))
            k, v = (self.spread(x, op.num_heads // op.num_kv_heads) for x in (k, v))
            scores = self.scores(op, self.queries(q, query, 1), k)[:, 0]
            out[query] = torch.einsum("hk,khd->hd", scores.softmax(-1), v)
            lse[query] = self.sums(scores)
        return out.flatten(1).to(q.dtype), lse

    def ends(self, batch: AttentionBatch) -> Sequence[int]:
        assert batch.key_ends is not None
        ends: list[int] = batch.key_ends.tolist()
        return ends

    def sums(self, scores: Tensor) -> Tensor:
        return scores.logsumexp(-1)


class SharedSuite(OnPlugin, LogSumExpConformance):
    capabilities = SharedKeys.capabilities

    def make(self, context: BuildContext) -> Any:
        return self.plugin(context)


class Suite(OnPlugin, AttentionKernelConformance):
    capabilities = Plain.capabilities

    def make(self, context: BuildContext) -> Any:
        return self.plugin(context)


class CapturedSuite(OnPlugin, CapturableConformance):
    capabilities = Captured.capabilities

    def make(self, context: BuildContext) -> Any:
        return self.plugin(context)


correct(Suite, Plain)
correct(CapturedSuite, Captured)
correct(SharedSuite, SharedKeys)


@mutant(SharedSuite, SHARED)
class LogarithmOfBaseTwo(SharedKeys):
    """Says the logarithm of base 2, as its exponents are."""

    def sums(self, scores: Tensor) -> Tensor:
        return super().sums(scores) / math.log(2.0)


@mutant(SharedSuite, SHARED)
class EndsOfRows(SharedKeys):
    """Has all queries of a row see what its last one sees."""

    def ends(self, batch: AttentionBatch) -> Sequence[int]:
        counts = zip(batch.q_lens, self.key_counts(batch), strict=True)
        return [count for q_len, count in counts for _ in range(q_len)]


@mutant(SharedSuite, SHARED)
class NoKeysAreNone(SharedKeys):
    """Says 0 of a query that sees no key."""

    def sums(self, scores: Tensor) -> Tensor:
        return super().sums(scores).nan_to_num(neginf=0.0)


@mutant(Suite, EQUALS)
class IgnoresTheScale(Plain):
    """Multiplies scores by ``head_dim ** -0.5`` whatever the op says."""

    def scores(self, op: Attention, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(replace(op, scale=op.head_dim**-0.5), q, k)


@mutant(Suite, STORED)
class IgnoresStoredScales(Plain):
    """Takes what is stored for keys and values, without their scales."""

    def unpacked(self, cache: LayerCache, stored: Tensor, scale: Tensor | None, slots: Tensor) -> Tensor:
        return picked(stored, slots).float()


@mutant(Suite, STORED)
class ForgetsKeyScales(Plain):
    """Multiplies values by their scales and keys by nothing."""

    def read(self, cache: LayerCache, slots: Tensor) -> tuple[Tensor, Tensor]:
        return picked(cache.k, slots).float(), super().read(cache, slots)[1]


@mutant(Suite, STORED)
class KeyScalesForValues(Plain):
    """Multiplies values by the scales of keys."""

    def read(self, cache: LayerCache, slots: Tensor) -> tuple[Tensor, Tensor]:
        return super().read(replace(cache, v_scale=cache.k_scale), slots)


@mutant(Suite, STORED)
class ScaleOfTheFirstHead(Plain):
    """Uses the scales of the first KV head for all."""

    def unpacked(self, cache: LayerCache, stored: Tensor, scale: Tensor | None, slots: Tensor) -> Tensor:
        if scale is not None:
            scale = scale[..., :1].expand_as(scale)
        return super().unpacked(cache, stored, scale, slots)


@mutant(Suite, EQUALS)
class BlockTooEarly(Plain):
    """Moves on to the next block one token too early."""

    def slots(self, batch: AttentionBatch, row: int, kv_len: int) -> Tensor:
        position, size = torch.arange(kv_len), batch.block_size
        block = ((position + 1) // size).clamp(max=(kv_len - 1) // size)
        return batch.block_tables[row, block].long() * size + position % size


@mutant(Suite, EQUALS)
class BlocksInARow(Plain):
    """Takes the blocks of a row to lie one after another, from its first on."""

    def slots(self, batch: AttentionBatch, row: int, kv_len: int) -> Tensor:
        first, size = int(batch.block_tables[row, 0]), batch.block_size
        return (first * size + torch.arange(kv_len)) % (int(batch.block_tables.max() + 1) * size)


@mutant(Suite, EQUALS)
class TableOfTheFirstRow(Plain):
    """Reads every row through the first row's block table."""

    def slots(self, batch: AttentionBatch, row: int, kv_len: int) -> Tensor:
        return super().slots(batch, 0, kv_len)


@mutant(Suite, EQUALS)
class LengthOfTheLongest(Plain):
    """Attends to as many keys as the longest row has."""

    def key_counts(self, batch: AttentionBatch) -> Sequence[int]:
        return (max(batch.kv_lens),) * len(batch.kv_lens)


@mutant(Suite, "test_blocks_that_a_window_has_passed_are_not_read")
class MultipliesByZero(Plain):
    """Reads what the window has passed, and multiplies it by 0."""

    def seen(self, v: Tensor, hidden: Tensor) -> Tensor:
        return v


@mutant(Suite, "test_lengths_on_the_host_are_bounds")
class LengthsOnTheHost(Plain):
    """Takes the host's bounds for the lengths of rows."""

    def key_counts(self, batch: AttentionBatch) -> Sequence[int]:
        return batch.kv_lens


@mutant(Suite, EQUALS)
class HeadsInTurns(Plain):
    """Gives query head ``h`` the KV head ``h % num_kv_heads``."""

    def spread(self, x: Tensor, group: int) -> Tensor:
        return x.repeat(1, group, 1)


@mutant(Suite, EQUALS)
class WiderWindow(Plain):
    """Sees one key more than the window holds."""

    def hidden(self, op: Attention, num_queries: int, num_keys: int) -> Tensor:
        wider = op.window if op.window is None else op.window + 1
        return super().hidden(replace(op, window=wider), num_queries, num_keys)


@mutant(Suite, EQUALS)
class NoWindow(Plain):
    """Claims windows and sees every key."""

    def hidden(self, op: Attention, num_queries: int, num_keys: int) -> Tensor:
        return super().hidden(replace(op, window=None), num_queries, num_keys)


@mutant(Suite, EQUALS)
class ChunkAsWindow(Plain):
    """Takes a chunk for a window of as many tokens."""

    def hidden(self, op: Attention, num_queries: int, num_keys: int) -> Tensor:
        return super().hidden(replace(op, window=op.chunk or op.window, chunk=None), num_queries, num_keys)


@mutant(Suite, EQUALS)
class CapBeforeScale(Plain):
    """Caps scores before they are scaled."""

    def scores(self, op: Attention, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(replace(op, scale=1.0), q, k) * op.scale


@mutant(Suite, EQUALS)
class SeesTheNext(Plain):
    """Lets a query see the key after its own."""

    def hidden(self, op: Attention, num_queries: int, num_keys: int) -> Tensor:
        return super().hidden(op, num_queries, num_keys).roll(1, dims=1).index_fill(1, torch.tensor([0]), False)


@mutant(Suite, EQUALS)
class PromptsOnly(Plain):
    """Masks as if a row's queries were its first tokens, not its last."""

    def hidden(self, op: Attention, num_queries: int, num_keys: int) -> Tensor:
        return torch.arange(num_keys)[None, :] > torch.arange(num_queries)[:, None]


@mutant(Suite, EQUALS)
class ColumnShort(Plain):
    """Returns all columns but the last."""

    def forward(self, prepared: Any, op: Attention, q: Tensor, cache: LayerCache) -> Tensor:
        return super().forward(prepared, op, q, cache)[:, :-1].contiguous()


@mutant(Suite, EQUALS)
class HeadsMissing(Plain):
    """Returns one head's width."""

    def forward(self, prepared: Any, op: Attention, q: Tensor, cache: LayerCache) -> Tensor:
        return super().forward(prepared, op, q, cache)[:, : op.head_dim].contiguous()


@mutant(Suite, EQUALS)
class Strided(Plain):
    """Returns a view that is not contiguous."""

    def forward(self, prepared: Any, op: Attention, q: Tensor, cache: LayerCache) -> Tensor:
        return super().forward(prepared, op, q, cache).T.contiguous().T


@mutant(Suite, EQUALS)
class AlwaysFloat32(Plain):
    """Returns float32 for queries in bfloat16."""

    def forward(self, prepared: Any, op: Attention, q: Tensor, cache: LayerCache) -> Tensor:
        return super().forward(prepared, op, q.float(), cache)


@mutant(Suite, EQUALS)
class SixteenBitScores(Plain):
    """Computes scores in bfloat16, for float32 queries as well."""

    def scores(self, op: Attention, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(op, q.bfloat16(), k.bfloat16()).float()


@mutant(Suite, EQUALS)
class SixteenBitSums(Plain):
    """Adds values up in bfloat16 one by one."""

    def attend(self, op: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (self.spread(x, op.num_heads // op.num_kv_heads) for x in (k, v))
        weights = self.scores(op, q, k).masked_fill(self.hidden(op, len(q), len(k)), float("-inf")).softmax(-1)
        total = torch.zeros(len(q), op.num_heads, op.head_dim, dtype=torch.bfloat16)
        for key in range(len(k)):
            total += (weights[:, :, key].T[..., None] * v[key]).bfloat16()
        return total.float()


@mutant(Suite, EQUALS)
class ForgetsTheLastKeys(Plain):
    """Reads whole tiles of 16 keys, and of the last one what is there when it is full."""

    def hidden(self, op: Attention, num_queries: int, num_keys: int) -> Tensor:
        found = super().hidden(op, num_queries, num_keys)
        if num_keys > 16 and num_queries == 1:
            found[:, num_keys // 16 * 16 :] = True
        return found


@mutant(Suite, READS)
class ScalesQueriesInPlace(Plain):
    """Multiplies the queries themselves by the scale."""

    def forward(self, prepared: Any, op: Attention, q: Tensor, cache: LayerCache) -> Tensor:
        return super().forward(prepared, replace(op, scale=1.0), q.mul_(op.scale), cache)


@mutant(Suite, READS)
class ClearsTheTables(Plain):
    """Clears the block tables once it has read them."""

    def forward(self, prepared: Any, op: Attention, q: Tensor, cache: LayerCache) -> Tensor:
        got = super().forward(prepared, op, q, cache)
        prepared.block_tables.zero_()
        return got


@mutant(Suite, LAYERS)
class KeysOfTheFirstLayer(Plain):
    """Keeps the keys and values it has gathered for a batch, and uses them in all layers."""

    def prepare(self, batch: AttentionBatch) -> Any:
        return (batch, {})

    def forward(self, prepared: Any, op: Attention, q: Tensor, cache: LayerCache) -> Tensor:
        batch, kept = prepared
        return super().forward(batch, op, q, kept.setdefault("cache", cache))


@mutant(Suite, LAYERS)
class WindowOfTheFirstLayer(Plain):
    """Works out a mask for the first layer's window, and uses it in all layers."""

    def prepare(self, batch: AttentionBatch) -> Any:
        return (batch, {})

    def forward(self, prepared: Any, op: Attention, q: Tensor, cache: LayerCache) -> Tensor:
        batch, kept = prepared
        return super().forward(batch, replace(op, window=kept.setdefault("window", op.window)), q, cache)


@mutant(Suite, BATCHES, raises=IndexError)
class LastPrepared(Plain):
    """Keeps the batch that was prepared last to itself, and computes that one."""

    def prepare(self, batch: AttentionBatch) -> Any:
        self._batch = batch
        return None

    def forward(self, prepared: Any, op: Attention, q: Tensor, cache: LayerCache) -> Tensor:
        return super().forward(self._batch, op, q, cache)


@mutant(Suite, "test_rows_without_queries_are_harmless")
class RaisesOnPadding(Plain):
    """Expects every row to have a query."""

    def prepare(self, batch: AttentionBatch) -> Any:
        assert all(batch.q_lens)
        return batch


@mutant(Suite, "test_queries_may_be_a_view_of_a_fused_projection")
class FlatQueries(Plain):
    """Reads queries as flat memory, where keys and values lie between them."""

    def queries(self, q: Tensor, first: int, count: int) -> Tensor:
        return q.as_strided(q.shape, (q.shape[1] * q.shape[2], q.shape[2], 1))[first : first + count].float()


@mutant(Suite, "test_the_same_call_gives_the_same_bits")
class OtherBits(Plain):
    """Returns results whose last bits differ from call to call, as sums in any order do."""

    _calls = 0

    def attend(self, op: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._calls += 1
        return super().attend(op, q, k, v) * (1.0 + self._calls * 2.0**-23)


@mutant(Suite, "test_the_suites_of_all_that_the_kernel_offers_are_inherited")
class SaysCapturable(Plain):
    """Claims to be capturable, and reads lengths on the host."""

    capabilities = replace(Plain.capabilities, capturable=True)


@mutant(CapturedSuite, CAPTURED)
class LengthsOfTheHost(Captured):
    """Reads the lengths of rows from the host's copy, which means nothing in a graph."""

    def lengths(self, batch: AttentionBatch) -> Tensor:
        return torch.tensor(batch.kv_lens)


@mutant(CapturedSuite, "test_a_captured_call_asks_nothing_of_the_host")
class ListsLengths(Captured):
    """Makes a list of the lengths of rows in every layer."""

    def forward(self, prepared: Any, op: Attention, q: Tensor, cache: LayerCache) -> Tensor:
        longest: Sequence[int] = prepared.kv_lens_device.tolist()
        width = -(-max(longest) // prepared.block_size)
        return super().forward(replace(prepared, block_tables=prepared.block_tables[:, :width]), op, q, cache)


@mutant(CapturedSuite, EQUALS)
class MultipliesThePoison(Captured):
    """Multiplies what no query sees by zero, and NaN with it."""

    def read(self, cache: LayerCache, slots: Tensor) -> tuple[Tensor, Tensor]:
        k, v = super().read(cache, slots)
        return k, v + 0.0 * cache.v[0, 0].float()
