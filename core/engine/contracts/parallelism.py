"""Slot ``parallelism``: how are weights and work split over devices?

One scheduler plans; workers never decide. Collectives work on named groups: ``tp`` (tensor), ``pp`` (pipeline),
``ep`` (expert), ``sp`` (sequence). With one rank, ``shard`` alone is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from engine.contracts.ops import LinearSpec

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class Parallelism(Protocol):
    """The plugin."""

    rank: int
    world_size: int

    def shard(self, spec: LinearSpec) -> tuple[int, int]:
        """``(index, count)``: which of how many equal cuts of ``spec.shard`` this rank holds."""
        ...

    def all_reduce(self, x: Tensor, group: str) -> Tensor:
        """The sum of all ranks' ``x``, on every rank."""
        ...

    def all_gather(self, x: Tensor, group: str, axis: int) -> Tensor:
        """All ranks' ``x`` joined along ``axis`` in the order of ranks, on every rank."""
        ...

    def reduce_scatter(self, x: Tensor, group: str, axis: int) -> Tensor:
        """This rank's cut, along ``axis``, of the sum of all ranks' ``x``."""
        ...

    def all_to_all(self, x: Tensor, group: str) -> Tensor:
        """Along the first axis of ``x``: cut ``i`` goes to rank ``i``; what came, joined in the order of ranks."""
        ...

    def broadcast(self, data: bytes, group: str) -> bytes:
        """Rank 0's bytes to every rank of the group."""
        ...

    def launch(self, plan_json: str) -> None:
        """Start the workers of the further ranks (``python -m`` children) with the plan."""
        ...

    def healthy(self) -> tuple[str, ...]:
        """Problems of workers, one line each; empty when all is well."""
        ...

    def close(self) -> None:
        """End what was launched."""
        ...
