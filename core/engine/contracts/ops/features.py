"""Ops that choose features and put them in order."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.contracts.ops.base import Mine, Node, Op


@dataclass(frozen=True, slots=True)
class Slice(Op):
    """Features ``start .. stop``."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class HeadSlice(Op):
    """Dimensions ``start .. stop`` of each head of ``head_dim``."""

    head_dim: int
    start: int
    stop: int

    def parts(self, size: int) -> int:
        return size // self.head_dim


@dataclass(frozen=True, slots=True)
class HeadJoin(Op):
    """``(a, b)``, ``num_heads`` heads each: head by head, those of ``a`` and then those of ``b``."""

    num_heads: int

    def parts(self, size: int) -> int:
        return self.num_heads

    def of_rank(self, node: Node, mine: Mine) -> Node:
        return replace(node, op=replace(self, num_heads=mine(self.num_heads).size))
