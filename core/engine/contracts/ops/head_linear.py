"""Projections of heads."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.contracts.ops.base import Mine, Node, Op
from engine.contracts.ops.linear_spec import LinearPart, LinearSpec, Share
from engine.contracts.ops.values import Cut
from engine.contracts.ops.work import OpStep, OpWork


@dataclass(frozen=True, slots=True)
class HeadLinear(Op):
    """A projection of each head by itself: rows ``start .. stop`` of its ``rows`` rows of ``{name}.weight [num_heads *
    rows, features]``. ``x [num_heads * features] @ W.T``, or with ``transposed`` ``x [num_heads * (stop - start)] @
    W``."""

    name: str
    num_heads: int
    rows: int
    features: int
    start: int
    stop: int
    transposed: bool = False
    heads: Cut | None = None
    """Of one rank; ``num_heads`` is then how many it has."""

    @property
    def projection(self) -> LinearSpec:
        """What all heads' rows are together."""
        spec = LinearSpec((LinearPart(self.name, self.num_heads * self.rows),), self.features)
        if self.heads is None:
            return spec
        whole = LinearSpec((LinearPart(self.name, self.heads.whole * self.rows),), self.features)
        rows = self.heads.start * self.rows, self.heads.stop * self.rows
        return replace(spec, share=Share(whole, ((rows,),)))

    @property
    def projections(self) -> tuple[LinearSpec, ...]:
        return (self.projection,)

    def parts(self, size: int) -> int:
        return self.num_heads

    def of_rank(self, node: Node, mine: Mine) -> Node:
        heads = mine(self.num_heads)
        return replace(node, op=replace(self, num_heads=heads.size, heads=heads))

    def work(self, node: Node, at: OpStep) -> OpWork:
        size = self.num_heads * (self.stop - self.start) * self.features
        return OpWork("linear", size * at.widths.values / 8, 2.0 * at.num_tokens * size)
