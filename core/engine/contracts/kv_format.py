"""Slot ``kv_format``: how is a cached key or value stored?

The layout is the core's: ``[num_blocks, block_size, num_kv_heads, head_dim]``, keys and values apart, one pair of
tensors per layer. A format chooses the storage dtype and the scales, and says how to pack and unpack.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class KVFormat(Protocol):
    """The plugin."""

    scale: Literal["none", "per_layer_head", "per_token_head"]
    """Granularity of the scales kept beside the cache. With ``none`` and the compute dtype as storage dtype, ``pack``
    and ``unpack`` must return what they are given: kernels then use the cache without asking the format."""
    lossless: bool
    """True when ``unpack(pack(x)) == x`` bit for bit."""

    def storage_dtype(self, compute_dtype: str) -> str:
        """Name of the torch dtype in which keys and values are stored, for example ``bfloat16``."""
        ...

    def pack(self, x: Tensor, scale: Tensor | None) -> Tensor:
        """``[num_tokens, num_kv_heads, head_dim]`` in the compute dtype -> the storage dtype."""
        ...

    def unpack(self, x: Tensor, scale: Tensor | None, dtype: Any) -> Tensor:
        """The inverse of :meth:`pack`, to the torch dtype ``dtype``."""
        ...

    def load_tile(self) -> Any | None:
        """A ``@triton.jit`` function that attention kernels inline to load and unpack a tile, or ``None`` when a
        plain ``tl.load`` is right.

        .. code-block:: python

            @triton.jit
            def load_tile(ptr, offsets, mask, scale_ptr, scale_offsets, DTYPE: tl.constexpr):
                ...

        ``ptr``: the cache of one layer; ``offsets``: int64 ``[tokens, dims]``, elements from ``ptr``; ``mask``:
        bool, same shape. ``scale_ptr``: that layer's float32 scales, ``[num_kv_heads]`` (``per_layer_head``) or
        ``[num_blocks, block_size, num_kv_heads]`` (``per_token_head``), contiguous; ``scale_offsets``: int64
        ``[tokens, 1]``; with ``scale == "none"`` both are to be ignored. Where the mask is False neither may be
        trusted. Returns ``[tokens, dims]`` in ``DTYPE``, 0 where masked.
        """
        ...

    def store_tile(self) -> Any | None:
        """A ``@triton.jit`` function with which fused kernels pack and store, or ``None`` when a plain ``tl.store`` of
        the value as it is (cast to the storage dtype) is right.

        .. code-block:: python

            @triton.jit
            def store_tile(ptr, offsets, x, mask, scale):
                ...

        ``ptr``: the cache of one layer; ``offsets``: int64, elements from ``ptr``; ``x``: keys or values in the compute
        dtype; ``mask``: bool. ``offsets``, ``mask`` and ``x`` have, or broadcast to, one shape ``[m, n]``; it is the
        kernel's choice which axis is tokens and which dimensions. ``scale``: float32, broadcasts to that shape, the
        one :meth:`pack` would be given; with ``scale == "none"`` it is to be ignored. The stored bytes equal those of
        :meth:`pack`. A format that has no such function but needs one is stored with :meth:`pack`, in kernels of its
        own.
        """
        ...
