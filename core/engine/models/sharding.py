"""This rank's share of what a checkpoint stores, under tensor parallelism."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine.border.calls import broken, shown
from engine.contracts.ops import Attention, LinearSpec
from engine.contracts.parallelism import Parallelism
from engine.contracts.quantizer import StoredTensor

if TYPE_CHECKING:
    from torch import Tensor


def rank_of(parallelism: Parallelism, spec: LinearSpec) -> tuple[int, int]:
    """Which of how many cuts of a linear layer is this rank's."""
    match parallelism.shard(spec):
        case (int(index), int(count)) if 0 <= index < count and parallelism.world_size % count == 0:
            return index, count
        case found:
            among = f"of {parallelism.world_size} ranks (world_size)"
            raise broken(parallelism, "shard", f"returned {shown(found)}, expected (index, count) {among}")


def cut(tensor: Tensor, name: str, spec: LinearSpec, stored: StoredTensor, index: int, count: int) -> Tensor:
    """Cut ``index`` of ``count`` of a stored tensor. Raises ``ValueError`` if this axis cannot be cut so."""
    if count == 1 or spec.shard == "none" or tensor.dim() == 0:
        return tensor
    if stored.suffix == "bias" and spec.shard == "in":
        return tensor
    if spec.shard in stored.replicated:
        return tensor
    axis = stored.shard_axes.get(spec.shard)
    if axis is None:
        why = f": {stored.uncuttable}" if stored.uncuttable else ""
        raise ValueError(f"parallelism.tp={count}: {name} cannot be cut along its {spec.shard}put axis{why}")
    size = tensor.shape[axis]
    if size % (count * stored.quantum):
        raise ValueError(
            f"parallelism.tp={count}: {name} has {size} entries along its {spec.shard}put axis, which is not a "
            f"multiple of {count} x {stored.quantum}"
        )
    return tensor.narrow(axis, index * (size // count), size // count).contiguous()


def check_heads(num_heads: int, num_kv_heads: int, tp: int) -> None:
    """Raise ``ValueError`` for heads that ranks cannot share out."""
    if num_heads % tp or num_kv_heads % tp:
        heads = f"{num_heads} heads and {num_kv_heads} KV heads"
        raise ValueError(f"parallelism.tp={tp}: does not divide the model's {heads}")


def local_attention(op: Attention, tp: int) -> Attention:
    """One rank's heads of it."""
    return replace(op, num_heads=op.num_heads // tp, num_kv_heads=op.num_kv_heads // tp)
