"""Norms."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from engine.contracts.ops.base import Mine, Node, Op, TensorShape
from engine.contracts.ops.values import Cut


@dataclass(frozen=True, slots=True)
class Norm(Op):
    """Norm over each ``size`` features of the input, computed in float32 and cast once.

    ``rms`` (arXiv 1910.07467): ``x / sqrt(mean(x^2) + eps) * (offset + weight)``; ``layer`` (arXiv 1607.06450): the
    same of ``x - mean(x)``, plus ``{name}.bias`` where ``bias`` says so. ``{name}.weight [size]``; without a name
    there is no weight. An input of several times ``size`` features is so many heads, each normed by itself; with
    ``by_head`` each has a weight of its own, ``{name}.weight [heads, size]``.
    """

    kind: Literal["rms", "layer"]
    name: str | None
    size: int
    eps: float
    offset: float = 0.0
    bias: bool = False
    by_head: int = 0
    """Heads with a weight each; 0: all share one."""
    heads: Cut | None = None
    """With ``by_head``: of one rank."""

    @property
    def tensors(self) -> Iterable[TensorShape]:
        shape = (self.by_head, self.size) if self.by_head else (self.size,)
        shape = shape if self.heads is None else (self.heads.whole, self.size)
        if self.name is not None:
            yield f"{self.name}.weight", shape
            if self.bias:
                yield f"{self.name}.bias", shape

    @property
    def own_rows(self) -> Cut | None:
        return self.heads

    def parts(self, size: int) -> int | None:
        return self.by_head or (size // self.size if size > self.size else None)

    def of_rank(self, node: Node, mine: Mine) -> Node:
        if not self.by_head:
            return node
        heads = mine(self.by_head)
        return replace(node, op=replace(self, by_head=heads.size, heads=heads))
