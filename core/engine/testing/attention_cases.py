"""Batches of odd shapes for attention kernels, and their naive reference in float64.

``measure`` runs one case; :mod:`engine.testing.attention_kernel` makes pytest tests of them. Cache memory that no
query may see is filled with NaN, so a kernel that as much as multiplies it by zero fails.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from engine.contracts.attention_kernel import AttentionBatch, AttentionKernel, LayerCache
from engine.contracts.graph import TokenShare
from engine.contracts.kv_format import KVFormat
from engine.contracts.model import DeviceFacts
from engine.contracts.ops import Attention
from engine.contracts.provider import BuildContext
from engine.step.tables import BlockShare
from engine.testing.context import build_context

TOLERANCE: dict[str, float] = {"float32": 1e-5, "bfloat16": 2.0**-7, "float16": 2.0**-10}
"""Largest accepted ``|got - want| / (1 + |want|)``. In 16 bits the softmax weights and the output may each be cut to
the dtype once (2**-8 relative in bfloat16 when truncating, half of it when rounding); the inputs are exact."""


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

LARGE_CASES: tuple[AttentionCase, ...] = (
    AttentionCase("long_prompt", ((2048, 2048),), 32, 8, 128, 16),
    AttentionCase("long_chunk", ((1000, 5003),), 32, 8, 128, 16),
    AttentionCase("long_chunk_beside_decode", ((1, 4000), (1500, 1501), (1, 77), (5, 900)), 32, 8, 128, 16),
    AttentionCase("prompts_of_unequal_lengths", ((700, 700), (3, 3), (1301, 1301)), 14, 2, 64, 32),
    AttentionCase("long_prompt_window", ((1500, 1500),), 32, 8, 128, 16, window=512),
    AttentionCase("long_prompt_chunked", ((1500, 1500), (1, 1025)), 32, 8, 128, 16, chunk=512),
    AttentionCase("long_prompt_soft_cap", ((900, 1800),), 16, 8, 256, 64, soft_cap=50.0),
    AttentionCase("long_decode", ((1, 20011),), 32, 8, 128, 16),
    AttentionCase("decode_batch", tuple((1, 17 * i + 1) for i in range(64)), 32, 8, 128, 16),
    AttentionCase("verify_batch", tuple((8, 300 * i + 8) for i in range(8)), 32, 8, 128, 256),
    AttentionCase("head_dim_80_long", ((600, 600), (1, 3000)), 32, 32, 80, 16),
    AttentionCase("head_dim_96_long", ((600, 600), (1, 3000)), 32, 32, 96, 16),
    AttentionCase("sinks_long", ((1, 5000), (700, 1300)), 64, 8, 64, 16, sinks=True),
    AttentionCase("sinks_window_long", ((1, 5000), (700, 1300)), 64, 8, 64, 16, window=128, sinks=True),
    AttentionCase("latent_long_decode", ((1, 9001), (4, 300)), 128, 1, 576, 64, value_dim=512),
    AttentionCase("latent_prompt", ((300, 700),), 128, 1, 576, 64, value_dim=512),
)
"""For a real device: long prefill, long contexts, real head counts."""


class PlainFormat:
    """Keys and values stored as they are; what kernels are tested with when no format is given."""

    scale: Literal["none", "per_layer_head", "per_token_head"] = "none"
    lossless = True

    def storage_dtype(self, compute_dtype: str) -> str:
        return compute_dtype

    def pack(self, x: Tensor, scale: Tensor | None) -> Tensor:
        return x

    def unpack(self, x: Tensor, scale: Tensor | None, dtype: Any) -> Tensor:
        return x.to(dtype)

    def load_tile(self) -> Any | None:
        return None

    def store_tile(self) -> Any | None:
        return None


class Int8Format(PlainFormat):
    """Keys and values in int8, with scales of either granularity."""

    lossless = False

    def __init__(self, scale: Literal["per_layer_head", "per_token_head"]) -> None:
        self.scale = scale

    def storage_dtype(self, compute_dtype: str) -> str:
        return "int8"

    def pack(self, x: Tensor, scale: Tensor | None) -> Tensor:
        assert scale is not None
        return (x.float() / scale[..., None]).round().clamp(-127.0, 127.0).to(torch.int8)

    def unpack(self, x: Tensor, scale: Tensor | None, dtype: Any) -> Tensor:
        assert scale is not None
        return (x.float() * scale[..., None]).to(dtype)


class NarrowFormat(PlainFormat):
    """Keys and values in float16 without scales, whatever is computed with."""

    lossless = False

    def storage_dtype(self, compute_dtype: str) -> str:
        return "float16"

    def pack(self, x: Tensor, scale: Tensor | None) -> Tensor:
        return x.float().clamp(-65504.0, 65504.0).half()


FORMATS: dict[str, KVFormat] = {
    "int8_per_layer_head": Int8Format("per_layer_head"),
    "int8_per_token_head": Int8Format("per_token_head"),
    "float16": NarrowFormat(),
}
"""What any kernel reads besides the compute dtype: storage that a plain load reads, with scales and without."""


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Tensors of a case, as :meth:`AttentionKernel.forward` takes them, and the plain keys and values per row."""

    batch: AttentionBatch
    q: Tensor
    cache: LayerCache
    keys: tuple[Tensor, ...]
    """``[kv_len, num_kv_heads, head_dim]`` per row, as the cache gives them back."""
    values: tuple[Tensor, ...]
    sinks: Tensor | None = None

    @property
    def more(self) -> tuple[Tensor, ...]:
        """What a kernel is given beside queries and cache."""
        return () if self.sinks is None else (self.sinks,)


def make_inputs(
    case: AttentionCase,
    dtype: str,
    device: str,
    kv_format: KVFormat | None = None,
    padding_rows: int = 0,
    tables_of: AttentionCase | None = None,
) -> AttentionInputs:
    """Random inputs, the same on every machine. ``padding_rows`` rows of no queries follow, as in a captured graph.
    ``tables_of``: a case with the same rows, whose blocks they lie in.

    Blocks of a row are scattered over the cache; block 0 belongs to nobody.
    """
    kv_format = kv_format or PlainFormat()
    generator = _generator(case)
    compute = getattr(torch, dtype)
    counts = [-(-kv_len // case.block_size) for _, kv_len in case.rows]
    order = (torch.randperm(sum(counts), generator=_generator(tables_of or case)) + 1).tolist()
    tables = torch.zeros(len(case.rows) + padding_rows, max(counts) + 1, dtype=torch.int32)
    shape = (sum(counts) + 1, case.block_size, case.num_kv_heads, case.head_dim)
    scales = ((0.02, 0.03), (0.05, 0.025)) if case.value_dim is None else ((0.02, 0.03),)
    caches = [_Cache(kv_format, shape, dtype, one) for one in scales]
    plain: tuple[list[Tensor], list[Tensor]] = ([], [])
    for row, (count, (_, kv_len)) in enumerate(zip(counts, case.rows)):
        blocks = [order.pop() for _ in range(count)]
        tables[row, :count] = torch.tensor(blocks, dtype=torch.int32)
        for cache, rows in zip(caches, plain):
            x = torch.randn(kv_len, case.num_kv_heads, case.head_dim, generator=generator).to(compute)
            rows.append(cache.write(x, blocks).to(device))
    q_lens = [q_len for q_len, _ in case.rows]
    starts = torch.tensor([0, *q_lens, *[0] * padding_rows]).cumsum(0)
    q = torch.randn(sum(q_lens), case.num_heads, case.head_dim, generator=generator).to(compute)
    kv_lens = [kv_len for _, kv_len in case.rows] + [0] * padding_rows
    batch = AttentionBatch(
        q_lens=tuple(q_lens + [0] * padding_rows),
        kv_lens=tuple(kv_lens),
        block_tables=tables.to(device),
        q_starts=starts.to(device, torch.int32),
        kv_lens_device=torch.tensor(kv_lens, dtype=torch.int32, device=device),
        block_size=case.block_size,
    )
    cached = _layer_cache(case, caches, kv_format, device)
    keys, values = plain if case.value_dim is None else (plain[0], [row[..., : case.value_dim] for row in plain[0]])
    # Sinks that weigh little, about as much as all keys, and more.
    sinks = torch.linspace(-2.0, 6.0, case.num_heads, device=device) if case.sinks else None
    return AttentionInputs(batch, q.to(device), cached, tuple(keys), tuple(values), sinks)


def _layer_cache(case: AttentionCase, caches: Sequence[_Cache], kv_format: KVFormat, device: str) -> LayerCache:
    (k, k_scale), *beside = (
        (one.data.to(device), one.scale if one.scale is None else one.scale.to(device)) for one in caches
    )
    v, v_scale = beside[0] if beside else (k[..., : case.value_dim], k_scale)
    return LayerCache(k, v, kv_format, k_scale, v_scale)


def _generator(case: AttentionCase) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(case.name.encode()))


class _Cache:
    """Cache memory of one kind with its scales, poisoned where nothing was written. ``scales``: of the first and the
    last head, where they are fixed."""

    def __init__(
        self, kv_format: KVFormat, shape: tuple[int, int, int, int], dtype: str, scales: tuple[float, float]
    ) -> None:
        self.format = kv_format
        storage = getattr(torch, kv_format.storage_dtype(dtype))
        poison = float("nan") if storage.is_floating_point else torch.iinfo(storage).max
        self.data = torch.full(shape, poison, dtype=torch.float32).to(storage)
        self.scale: Tensor | None = None
        if kv_format.scale == "per_layer_head":
            self.scale = torch.linspace(*scales, shape[2])
        elif kv_format.scale == "per_token_head":
            self.scale = torch.full(shape[:3], float("nan"))

    def write(self, x: Tensor, blocks: Sequence[int]) -> Tensor:
        """Write ``[tokens, heads, dim]`` into ``blocks``; returns what the format reads back, unrounded."""
        scale = self.scale
        if self.format.scale == "per_token_head":
            scale = x.float().abs().amax(-1) / 100.0
        packed = self.format.pack(x, scale)
        size = self.data.shape[1]
        for i, block in enumerate(blocks):
            part = slice(i * size, (i + 1) * size)
            here = packed[part]
            self.data[block, : len(here)] = here
            if self.format.scale == "per_token_head":
                assert scale is not None and self.scale is not None
                self.scale[block, : len(here)] = scale[part]
        return self.format.unpack(packed, scale, torch.float32)


def reference(case: AttentionCase, inputs: AttentionInputs) -> Tensor:
    """The definition: ``[num_tokens, num_heads * op.out_dim]`` in float64, one row and one mask at a time.

    Query at position ``p`` sees keys ``j <= p``, with a window only ``j > p - window``, and with chunks only those of
    its own.
    """
    op, group = case.op, case.num_heads // case.num_kv_heads
    outs, first = [], 0
    for (q_len, kv_len), keys, values in zip(case.rows, inputs.keys, inputs.values):
        q = inputs.q[first : first + q_len].double()
        k = keys.double().repeat_interleave(group, dim=1)
        v = values.double().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * op.scale
        if op.soft_cap is not None:
            scores = op.soft_cap * torch.tanh(scores / op.soft_cap)
        position = torch.arange(kv_len - q_len, kv_len, device=q.device)[:, None]
        key = torch.arange(kv_len, device=q.device)[None, :]
        hidden = key > position
        if op.window is not None:
            hidden |= key <= position - op.window
        if op.chunk is not None:
            hidden |= key // op.chunk != position // op.chunk
        scores = scores.masked_fill(hidden, float("-inf"))
        if inputs.sinks is not None:
            more = inputs.sinks.double()[:, None, None].expand(-1, q_len, 1)
            scores = torch.cat((scores, more), dim=-1)
        weights = scores.softmax(-1)[..., :kv_len]
        outs.append(torch.einsum("hqk,khd->qhd", weights, v).reshape(q_len, -1))
        first += q_len
    return torch.cat(outs)


def of_rank(case: AttentionCase, inputs: AttentionInputs, ranks: int, index: int) -> AttentionInputs:
    """The same queries where ``ranks`` share out the tokens of every row: how many keys the ``index``-th has. Which
    keys these are does not matter: they are the first ones of each row."""
    stretch, batch = BlockShare.of(TokenShare(ranks, index), ranks * case.block_size), inputs.batch
    ends = [kv_len - q_len + j + 1 for q_len, kv_len in case.rows for j in range(q_len)]
    own = stretch.length(batch.kv_lens_device.long()).int()
    shared = replace(
        batch,
        kv_lens=tuple(stretch.most(kv_len) for kv_len in batch.kv_lens),
        kv_lens_device=own,
        key_ends=stretch.length(torch.tensor(ends)).to(own),
    )
    return replace(inputs, batch=shared)


def reference_lse(case: AttentionCase, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """:meth:`engine.contracts.attention_kernel.LogSumExpAttention.forward_lse` in float64, one query at a time."""
    op, group, key_ends = case.op, case.num_heads // case.num_kv_heads, inputs.batch.key_ends
    assert key_ends is not None
    out = torch.zeros(len(key_ends), op.num_heads, op.out_dim, dtype=torch.float64)
    lse = torch.full(out.shape[:2], float("-inf"), dtype=torch.float64)
    rows = [row for row, (q_len, _) in enumerate(case.rows) for _ in range(q_len)]
    for query, (row, end) in enumerate(zip(rows, key_ends.tolist(), strict=True)):
        keys, values = (x[row][:end].double().cpu().repeat_interleave(group, 1) for x in (inputs.keys, inputs.values))
        scores = torch.einsum("hd,khd->hk", inputs.q[query].double().cpu(), keys) * op.scale
        if op.soft_cap is not None:
            scores = op.soft_cap * torch.tanh(scores / op.soft_cap)
        if end:
            lse[query], out[query] = scores.logsumexp(1), torch.einsum("hk,khd->hd", scores.softmax(1), values)
    return out.flatten(1), lse


def make_context(case: AttentionCase, dtype: str, device: str) -> BuildContext:
    """A build context of a model with the case's heads. ``device``: ``cpu`` or ``cuda``."""
    plain = build_context(block_size=case.block_size, max_len=32768, max_requests=64, max_draft_tokens=8)
    model = replace(
        plain.model,
        hidden_size=case.num_heads * case.head_dim,
        attentions=(case.op,),
        dtype=dtype,
    )
    facts = DeviceFacts(kind="cuda" if device.startswith("cuda") else "cpu")
    return replace(plain, model=model, device=facts, dtype=dtype)


def run(kernel: AttentionKernel, case: AttentionCase, inputs: AttentionInputs) -> Tensor:
    """One prepare and one forward."""
    return forward(kernel, kernel.prepare(inputs.batch), case, inputs)


def forward(kernel: AttentionKernel, prepared: Any, case: AttentionCase, inputs: AttentionInputs) -> Tensor:
    call: Callable[..., Tensor] = kernel.forward
    return call(prepared, case.op, inputs.q, inputs.cache, *inputs.more)


def error(got: Tensor, want: Tensor) -> float:
    """Largest ``|got - want| / (1 + |want|)``; NaN anywhere makes it infinite."""
    gap = (got.double() - want).abs() / (1.0 + want.abs())
    return float(gap.nan_to_num(nan=float("inf")).max())


def measure(
    make_kernel: Callable[[BuildContext], AttentionKernel],
    case: AttentionCase,
    dtype: str,
    device: str,
    kv_format: KVFormat | None = None,
) -> float:
    """Error of a freshly built kernel on one case, to be compared with :data:`TOLERANCE`."""
    inputs = make_inputs(case, dtype, device, kv_format)
    got = run(make_kernel(make_context(case, dtype, device)), case, inputs)
    assert got.shape == (inputs.q.shape[0], case.num_heads * case.op.out_dim), f"shape {tuple(got.shape)}"
    assert got.dtype == inputs.q.dtype, f"dtype {got.dtype}"
    assert got.is_contiguous(), f"strides {got.stride()}"
    return error(got, reference(case, inputs))


def case_named(name: str) -> AttentionCase:
    """One of the small or large cases."""
    return next(case for case in SMALL_CASES + LARGE_CASES if case.name == name)
