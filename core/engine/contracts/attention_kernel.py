"""Slot ``attention_kernel``: attention of this batch over the paged cache.

The core has already written the new keys and values; a kernel only reads. One call serves prefill chunks, decode
rows and multi-token verification alike: rows are sequences with ``q_len >= 1`` query tokens each.

Everything is called on the device's thread under ``torch.inference_mode()``. A kernel is tried on a small batch of
every kind of row before weights are loaded, and compared with the definition. On a CPU, steps of few tokens are
programs only if the kernel is a :class:`NativeAttention` whose ``call`` returns one; with any other they run op by op.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from engine.contracts.kv_format import KVFormat
from engine.contracts.ops import Attention

if TYPE_CHECKING:
    from torch import Tensor

    from engine.native import NativeCall


@dataclass(frozen=True, slots=True)
class AttentionCapabilities:
    """What a kernel can do; the core refuses the plan otherwise, naming the reason."""

    head_dims: tuple[int, ...] | None
    """Of attention whose values are cached beside keys; ``None``: any."""
    dtypes: tuple[str, ...]
    window: bool
    soft_cap: bool
    max_verify_width: int
    capturable: bool
    """:meth:`AttentionKernel.forward` may be captured in a CUDA graph, and so may
    :meth:`LogSumExpAttention.forward_lse` where there is one: of decode steps, and of one row of up to 512 tokens."""
    heads_per_kv_head: int | None = None
    """Query heads that share a key-value head, in all layers alike, a drafter's included; ``None``: any."""
    sinks: bool = False
    """:attr:`~engine.contracts.ops.Attention.sinks`"""
    latent: bool = False
    """:attr:`~engine.contracts.ops.Attention.value_dim`: the cache's values are a view of its keys."""
    chunk: bool = False
    """:attr:`~engine.contracts.ops.Attention.chunk`"""


LOG_SUM_EXP = "log_sum_exp"
"""Capability of kernels that are a :class:`LogSumExpAttention`: decode context parallelism needs one."""


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One step's rows in one KV group. Query tokens of all rows are laid out one after another.

    ``q_lens`` and ``q_starts`` say the same thing. What a row attends to is in ``kv_lens_device`` alone: while a step
    with drafts is in flight the host does not know how many of them are accepted, and ``kv_lens`` are bounds.
    """

    q_lens: tuple[int, ...]
    """Query tokens per row; their sum is ``num_tokens``."""
    kv_lens: tuple[int, ...]
    """At least as many as ``kv_lens_device``, for planning."""
    block_tables: Tensor
    """int32 ``[num_rows, max_blocks]``: block ids in token order; entries past the end are 0, and those of blocks that
    the window or the chunk of the group's layers has passed may be 0 or another's."""
    q_starts: Tensor
    """int32 ``[num_rows + 1]``: first query token of each row, then ``num_tokens``."""
    kv_lens_device: Tensor
    """int32 ``[num_rows]``: keys each row attends to, the new tokens included. Query ``j`` of a row sees keys
    ``0 .. kv_len - q_len + j``."""
    block_size: int
    key_ends: Tensor | None = None
    """int32 ``[num_tokens]``, where ranks share out the tokens of a group: query ``j`` sees the keys ``0 ..
    key_ends[j]`` that this rank has, the last one not included, or none at all; and ``kv_lens_device`` says how many
    the last query of a row sees. They do not fall along a row. Only for :class:`LogSumExpAttention`."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The cached keys and values of one layer: one object, and the same tensors, for the life of the cache."""

    k: Tensor
    """``[num_blocks, block_size, num_kv_heads, head_dim]``, contiguous, in the storage dtype of ``format``."""
    v: Tensor
    """As ``k``; of latent attention a view of the first numbers of ``k``."""
    format: KVFormat
    k_scale: Tensor | None = None
    """float32, contiguous: ``[num_kv_heads]`` with ``KVFormat.scale == "per_layer_head"``, ``[num_blocks, block_size,
    num_kv_heads]`` with ``"per_token_head"`` (written with the keys), ``None`` with ``"none"``."""
    v_scale: Tensor | None = None
    """As ``k_scale``."""
    group: int = 0
    """Its KV group: what is prepared for a batch of that group is for this cache."""


@runtime_checkable
class AttentionKernel(Protocol):
    """The plugin."""

    capabilities: AttentionCapabilities

    def label(self, op: Attention, dtype: str, kv_format: KVFormat) -> str:
        """What computes ``op`` in the compute dtype ``dtype``, for the plan: for example ``CpuAttention, AMX-BF16``."""
        ...

    def prepare(self, batch: AttentionBatch) -> Any:
        """Host-side preparation, once per step and KV group, outside any graph. The result is handed to
        :meth:`forward`.

        For a graph, ``q_lens`` of the prepared batch are upper bounds and ``kv_lens`` mean nothing: a capturable
        kernel reads the lengths from the device tensors, which change in place between replays. The prepared value
        lives as long as the graph captured from it.
        """
        ...

    def forward(self, prepared: Any, op: Attention, q: Tensor, cache: LayerCache) -> Tensor:
        """Attention of one layer.

        ``q``: ``[num_tokens, num_heads, head_dim]`` in the compute dtype, perhaps a strided view. Returns contiguous
        ``[num_tokens, num_heads * head_dim]`` in the dtype of ``q``. No synchronisation, no compilation.
        """
        ...


@runtime_checkable
class SinkAttention(AttentionKernel, Protocol):
    """A kernel with the capability ``sinks``."""

    def forward(
        self, prepared: Any, op: Attention, q: Tensor, cache: LayerCache, sinks: Tensor | None = None
    ) -> Tensor:
        """``sinks``: float32 ``[num_heads]``, where ``op.sinks`` says so."""
        ...


@runtime_checkable
class LogSumExpAttention(Protocol):
    """An :class:`AttentionKernel` that can attend to a part of the keys, so that ranks may share them out (decode
    context parallelism); its provider provides :data:`LOG_SUM_EXP`."""

    def forward_lse(self, prepared: Any, op: Attention, q: Tensor, cache: LayerCache) -> tuple[Tensor, Tensor]:
        """As :meth:`AttentionKernel.forward`, of a batch with :attr:`AttentionBatch.key_ends`; ``op`` has no window, no
        chunk and no sinks. In a graph ``key_ends`` change in place, as the other lengths do.

        Returns the output ``[num_tokens, num_heads * out_dim]`` in the dtype of ``q``, and float32 ``[num_tokens,
        num_heads]``: the natural logarithm of the sum of ``exp(score)`` over the keys seen, scores scaled and capped.
        Of a query that sees no key that is ``-inf``, and what is in the output means nothing, NaN included.
        """
        ...


@runtime_checkable
class NativeAttention(Protocol):
    """An :class:`AttentionKernel` for the CPU whose layers may be calls of a program (:mod:`engine.native`).

    Such a call reads lengths of rows and block tables where the prepared batch has them as tensors, which change
    in place between runs; ``q_lens`` are upper bounds and ``kv_lens`` mean nothing, as in a graph."""

    def call(
        self, prepared: Any, op: Attention, q: Tensor, cache: LayerCache, out: Tensor, sinks: Tensor | None = None
    ) -> NativeCall | None:
        """The call that computes what :meth:`AttentionKernel.forward` returns, to ``out``; the contents of ``q`` mean
        nothing yet. ``None`` where that is no single native call."""
        ...
