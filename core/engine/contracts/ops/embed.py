"""The embedding of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.contracts.ops.base import Node, Op, TensorShape
from engine.contracts.ops.values import Cut
from engine.contracts.ops.work import OpStep, OpWork, Widths


@dataclass(frozen=True, slots=True)
class Embed(Op):
    """``tokens -> [num_tokens, size]``: rows of ``{name}.weight [vocab_size, size]``."""

    name: str
    vocab_size: int
    size: int
    rows: Cut | None = None
    """Of one rank; other tokens' rows are 0. ``None``: all."""

    @property
    def tensors(self) -> Iterable[TensorShape]:
        return ((f"{self.name}.weight", (self.vocab_size, self.size)),)

    @property
    def own_rows(self) -> Cut | None:
        return self.rows

    def held_bytes(self, node: Node, widths: Widths) -> float:
        return (self.vocab_size if self.rows is None else self.rows.size) * self.size * widths.values / 8

    def work(self, node: Node, at: OpStep) -> OpWork:
        return OpWork("other", at.value_bytes(self.size), 0.0)
