"""The paged cache: the core's layout, whatever a format stores of keys and values in it."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.contracts.attention_kernel import LayerCache
from engine.contracts.graph import KVSpec, StateSpec
from engine.contracts.kv_format import KVFormat
from engine.kernels.context import StateCache
from engine.kernels.storage import as_bits, largest_value, stored_tensors
from engine.kv.groups import CacheGroups
from engine.plugin_guard.calls import contract_error, quote


class KVCache:
    """The caches of the graph, then the drafter's own, by number: keys and values in :attr:`layers`, what recurrent ops
    left in :attr:`states`.

    A slot is ``block * block_size + offset``, of the cache's KV group. Where ranks share out the tokens of a group,
    each has a part of every block: its own block size is less than :attr:`block_size`.
    """

    def __init__(
        self,
        groups: CacheGroups,
        kv_format: KVFormat,
        num_blocks: Sequence[int],
        block_size: int,
        dtype: str,
        device: str,
    ) -> None:
        """``num_blocks``: of each group; ``block_size``: tokens of a block that an allocator hands out."""
        self.groups = groups
        self.num_blocks = tuple(num_blocks)
        self.block_size = block_size
        self._format = kv_format
        self._storage = storage_of(kv_format, dtype)
        # Made once, as are the [num_slots, heads, dim] views: making either anew in every layer and step is measurable
        # on a CPU.
        self.num_groups, self.group_of = groups.num_groups, groups.group_of
        layers: dict[int, LayerCache] = {}
        states: dict[int, StateCache] = {}
        own_sizes = groups.block_sizes(block_size)
        for cache, (spec, group) in enumerate(zip(groups.caches, groups.group_of, strict=True)):
            shape = num_blocks[group], own_sizes[group]
            if isinstance(spec, StateSpec):
                states[cache] = _empty_state(spec, shape, device)
            else:
                layers[cache] = _empty_layer(kv_format, spec, shape, self._storage, device, group)
        self.layers: Mapping[int, LayerCache] = layers
        self.states: Mapping[int, StateCache] = states
        self._key_slots = {cache: as_bits(layer.k.flatten(0, 1)) for cache, layer in self.layers.items()}
        self._value_slots = {cache: as_bits(layer.v.flatten(0, 1)) for cache, layer in self.layers.items()}
        self._slots = {
            cache: [as_bits(own.flatten(0, 1)) for own in self._own_tensors(cache) if own.dim() > 2] for cache in layers
        }
        self._blocks = [self._in_blocks(groups.members(group)) for group in range(groups.num_groups)]

    @staticmethod
    def block_bytes(groups: CacheGroups, kv_format: KVFormat, block_size: int, dtype: str) -> tuple[int, ...]:
        """By group: bytes one block takes over all its caches on this rank: keys, values and per-token scales, or
        states. ``block_size``: tokens of a block that an allocator hands out."""
        item = storage_of(kv_format, dtype).itemsize
        scale = torch.float32.itemsize if kv_format.scale == "per_token_head" else 0
        taken, own_sizes = [0] * groups.num_groups, groups.block_sizes(block_size)
        for spec, group in zip(groups.caches, groups.group_of, strict=True):
            if isinstance(spec, StateSpec):
                taken[group] += (block_size * spec.token_size + spec.state_size) * torch.float32.itemsize
            else:
                tensors = 2 if spec.value_dim is None else 1
                taken[group] += tensors * own_sizes[group] * spec.num_kv_heads * (spec.head_dim * item + scale)
        return tuple(taken)

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for cache in range(len(self.group_of)) for t in self._own_tensors(cache))

    def set_scales(self, layer: int, key_scale: Tensor, value_scale: Tensor) -> None:
        """Scales of a layer's heads as the checkpoint has them: float32, one number or ``[num_kv_heads]``.

        Raises ``ValueError`` for any other shape, and for scales that are not positive, finite numbers.
        """
        if self._format.scale != "per_layer_head":
            return
        cache = self.layers[layer]
        for name, held, scale in (("k", cache.k_scale, key_scale), ("v", cache.v_scale, value_scale)):
            assert held is not None
            given = scale.detach().to(held).flatten()
            if given.numel() not in (1, held.numel()):
                raise ValueError(f"{name}_scale {list(scale.shape)} of layer {layer}: expected one or {held.numel()}")
            if not bool((given.isfinite() & (given > 0)).all()):
                raise ValueError(f"{name}_scale of layer {layer}: {given.tolist()}, expected positive numbers")
            held.copy_(given.expand_as(held))

    def write(self, layer: int, slot_mapping: Tensor, k: Tensor, v: Tensor | None = None) -> None:
        """Store ``k``, ``v`` ``[num_tokens, num_kv_heads, head_dim]`` at int64 ``slot_mapping [num_tokens]``; ``v`` is
        missing where values are a part of keys.

        A slot may occur once only (two tokens in one place would race).
        """
        cache = self.layers[layer]
        self._store(self._key_slots[layer], cache.k_scale, slot_mapping, k)
        if v is not None:
            self._store(self._value_slots[layer], cache.v_scale, slot_mapping, v)

    def stored(self, cache: int, slots: Tensor) -> Tensor:
        """What a cache of keys and values has at int64 ``slots [n]``: uint8 ``[n, bytes of a token]``."""
        return torch.cat([own[slots].flatten(1).view(torch.uint8) for own in self._slots[cache]], dim=1)

    def store(self, cache: int, slots: Tensor, stored: Tensor) -> None:
        """Put there what :meth:`stored` found, perhaps on another rank. No slot may occur twice."""
        tensors = self._slots[cache]
        sizes = [own[0].numel() * own.itemsize for own in tensors]
        for own, part in zip(tensors, torch.split(stored, sizes, dim=1), strict=True):
            own.index_copy_(0, slots, part.contiguous().view(own.dtype).view(-1, *own.shape[1:]))

    def copy_block(self, group: int, source: int, target: int) -> None:
        """Make the tokens of a block those of another one, in all caches of a group, drafters' as well. The state
        after the block is not copied: it is written when the last token is computed, and not read before."""
        blocks = self._blocks[group]
        if not blocks:  # a stage may have no layer of the group
            return
        torch._foreach_copy_([stored[target] for stored in blocks], [stored[source] for stored in blocks])

    def block_tensors(self, group: int) -> list[Tensor]:
        """All that the caches of a group hold of blocks, drafters' as well: ``[num_blocks, ...]``, states after blocks
        among it."""
        found = [tensor for cache in self.groups.members(group) for tensor in self._own_tensors(cache)]
        return [
            tensor for tensor in found if tensor.dim() > 1 and tensor.numel()
        ]  # scales of heads are the checkpoint's

    def _in_blocks(self, caches: Sequence[int]) -> list[Tensor]:
        """``[num_blocks, block_size, ...]``: all that is of single tokens."""
        return [tensor for cache in caches for tensor in self._own_tensors(cache) if tensor.dim() > 2]

    def _own_tensors(self, cache: int) -> list[Tensor]:
        """All that is stored, but no values that are a part of keys."""
        if cache in self.states:
            return [self.states[cache].tokens, self.states[cache].states]
        k, v, k_scale, v_scale = stored_tensors(self.layers[cache])
        own = (k, k_scale) if self._latent(cache) else (k, v, k_scale, v_scale)
        return [tensor for tensor in own if tensor is not None]

    def _latent(self, cache: int) -> bool:
        spec = self.groups.caches[cache]
        return isinstance(spec, KVSpec) and spec.value_dim is not None

    def _store(self, slots: Tensor, scales: Tensor | None, slot_mapping: Tensor, x: Tensor) -> None:
        scale = scales
        if scales is not None and self._format.scale == "per_token_head":
            scale = x.abs().amax(dim=-1).float().div_(largest_value(self._storage)).clamp_min_(1e-12)
            scales.flatten(0, 1).index_copy_(0, slot_mapping, scale)
        slots.index_copy_(0, slot_mapping, as_bits(self._format.pack(x, scale)))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Zeros, not uninitialised memory: a stray NaN would survive a mask (0 * NaN is NaN).

    On a CPU the pages are the kernel's zero pages until somebody writes to them: a large pool costs nothing up front.
    Small pages on purpose: with huge ones, the first tokens of every request would wait for megabytes to be zeroed.
    """
    if device != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def storage_of(kv_format: KVFormat, dtype: str) -> torch.dtype:
    """What keys and values of the compute dtype ``dtype`` are stored in."""
    name: object = kv_format.storage_dtype(dtype)
    storage = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(storage, torch.dtype):
        raise contract_error(kv_format, "storage_dtype", f"returned {quote(name)}, expected the name of a torch dtype")
    return storage


def _empty_layer(
    kv_format: KVFormat, spec: KVSpec, blocks: tuple[int, int], storage: torch.dtype, device: str, group: int
) -> LayerCache:
    """``blocks``: how many, and tokens of each."""
    shape = (*blocks, spec.num_kv_heads, spec.head_dim)
    k = _zeros(shape, storage, device)
    k_scale, v_scale = (_ones(kv_format, shape, device) for _ in "kv")
    if spec.value_dim is not None:
        return LayerCache(k, k[..., : spec.value_dim], kv_format, k_scale, k_scale, group)
    return LayerCache(k, _zeros(shape, storage, device), kv_format, k_scale, v_scale, group)


def _empty_state(spec: StateSpec, blocks: tuple[int, int], device: str) -> StateCache:
    shapes = (*blocks, spec.token_size), (blocks[0], spec.state_size)
    return StateCache(*(_zeros(shape, torch.float32, device) for shape in shapes))


def _ones(kv_format: KVFormat, shape: tuple[int, ...], device: str) -> Tensor | None:
    """Scales of keys or values of this shape, if the format has any."""
    if kv_format.scale == "none":
        return None
    scaled = shape[:3] if kv_format.scale == "per_token_head" else shape[2:3]
    return torch.ones(scaled, dtype=torch.float32, device=device)
