"""What ranks exchange. The core alone places these."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contracts.ops.base import Node, Op
from engine.contracts.ops.values import Range
from engine.contracts.ops.work import Exchange, OpStep


@dataclass(frozen=True, slots=True)
class AllReduce(Op):
    """``x -> `` the sum of all ranks' ``x``, on every rank: of summands. Placed by the core alone, like all that ranks
    exchange."""

    def work(self, node: Node, at: OpStep) -> None:
        return None

    def exchange(self, node: Node, at: OpStep) -> Exchange:
        return Exchange("all_reduce", int(at.value_bytes(at.sizes[node.inputs[0]])))


@dataclass(frozen=True, slots=True)
class GatherTokens(Op):
    """``x -> `` that of the tokens of all ranks, in a step whose tokens they share out; ``x`` in any other."""


@dataclass(frozen=True, slots=True)
class SumTokens(Op):
    """``x -> `` the sum of ``x`` over all ranks of a stage, of a rank's own tokens: ``x`` has those that
    :class:`GatherTokens` gathered."""

    def work(self, node: Node, at: OpStep) -> None:
        return None

    def exchange(self, node: Node, at: OpStep) -> Exchange:
        return Exchange("all_reduce", int(at.value_bytes(at.sizes[node.inputs[0]])))


@dataclass(frozen=True, slots=True)
class AllGather(Op):
    """``x -> [num_tokens, size]``: all ranks' features, on every rank."""

    size: int
    shares: tuple[Range, ...]
    """By rank, the features that it has: some may be on several ranks."""
    group: str = "tp"
    """Of ranks."""

    def work(self, node: Node, at: OpStep) -> None:
        return None

    def exchange(self, node: Node, at: OpStep) -> Exchange:
        ranks = len(self.shares) if self.group != "tp" else None
        return Exchange("all_gather", int(at.value_bytes(self.size)), ranks)
