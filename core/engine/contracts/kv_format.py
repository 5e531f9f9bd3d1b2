"""Slot ``kv_format``: how is a cached key or value stored?

The layout is the core's: ``[num_blocks, block_size, num_kv_heads, head_dim]``, keys and values apart, one pair of
tensors per layer. A format chooses the storage dtype and the scales, and says how to pack and unpack.

``pack`` and ``unpack`` are called on the device's thread under ``torch.inference_mode()``, perhaps in a capture: they
may not read a tensor on the host. On a CPU, steps of few tokens are programs of native calls only while keys and values
are stored as they are: ``scale == "none"`` and the compute dtype as storage dtype. With any other format they run op by
op.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class KVFormat(Protocol):
    """The plugin."""

    scale: Literal["none", "per_layer_head", "per_token_head"]
    """Granularity of the scales kept beside the cache, float32. What is stored, times its scale, is what was written:
    ``unpack(x, scale) == x * scale``, so kernels may multiply scores and probabilities by scales instead of keys and
    values. ``per_layer_head``: from the checkpoint, 1 where it has none. ``per_token_head``: the core brings the
    largest element of a token's head to the largest number of the storage dtype.

    With ``none`` and the compute dtype as storage dtype, ``pack`` and ``unpack`` must return what they are given:
    kernels then use the cache without asking the format."""
    lossless: bool
    """True when ``unpack(pack(x)) == x`` bit for bit."""

    def storage_dtype(self, compute_dtype: str) -> str:
        """Name of the torch dtype in which keys and values are stored, for example ``bfloat16``."""
        ...

    def pack(self, x: Tensor, scale: Tensor | None) -> Tensor:
        """``[num_tokens, num_kv_heads, head_dim]`` in the compute dtype -> the storage dtype, finite where ``x`` is:
        what is too large becomes the largest number. ``scale``: float32 ``[num_kv_heads]`` or ``[num_tokens,
        num_kv_heads]``."""
        ...

    def unpack(self, x: Tensor, scale: Tensor | None, dtype: Any) -> Tensor:
        """The inverse of :meth:`pack`, to the torch dtype ``dtype``. With a scale, ``x`` is ``[num_tokens,
        num_kv_heads, head_dim]`` as in :meth:`pack`, and ``scale`` float32 ``[num_kv_heads]`` or ``[num_tokens,
        num_kv_heads]``; without one, ``x`` may have any shape and strides."""
        ...

    def load_tile(self) -> Any | None:
        """A ``@triton.jit`` function that attention kernels inline to load a tile, or ``None`` when a plain
        ``tl.load`` is right.

        .. code-block:: python

            @triton.jit
            def load_tile(ptr, offsets, mask, DTYPE: tl.constexpr):
                ...

        ``ptr``: the cache of one layer, in the storage dtype; one of 8-bit floats is handed over as uint8, their bits,
        because Triton has no such type on every device. ``offsets``: int64 ``[tokens, dims]``, elements from ``ptr``;
        ``mask``: bool, same shape. Returns what is stored, *not* multiplied by its scale (the kernel does that), in
        ``DTYPE``, 0 where masked; what is stored there may not even be loaded. The same function at every call: kernels
        are compiled for it.
        """
        ...

    def store_tile(self) -> Any | None:
        """A ``@triton.jit`` function with which fused kernels pack and store, or ``None`` when a plain ``tl.store`` of
        the value as it is (cast to the storage dtype) is right.

        .. code-block:: python

            @triton.jit
            def store_tile(ptr, offsets, x, mask, scale):
                ...

        ``ptr``: as in :meth:`load_tile`; ``offsets``: int64, elements from ``ptr``; ``x``: keys or values in the
        compute dtype; ``mask``: bool. ``offsets``, ``mask`` and ``x`` have, or broadcast to, one shape ``[m, n]``;
        which axis is tokens and which dimensions is the kernel's choice. ``scale``: float32, broadcasts to that
        shape, the one :meth:`pack` would be given; with ``scale == "none"`` it is to be ignored. The stored bytes equal
        those of :meth:`pack`. A format that has no such function but needs one is stored with :meth:`pack`, in
        kernels of its own. The same function at every call: kernels are compiled for it.
        """
        ...
