"""Linear layers."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contracts.ops.base import Node, Op
from engine.contracts.ops.linear_spec import LinearSpec
from engine.contracts.ops.work import OpStep, OpWork, Widths


@dataclass(frozen=True, slots=True)
class Linear(Op):
    """``x [num_tokens, in] ->`` the values of ``spec.outputs``: ``x @ weight.T (+ bias)``. ``tied``: the weight is that
    of the embedding."""

    spec: LinearSpec
    tied: bool = False

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        return (self.spec,)

    def held_bytes(self, node: Node, widths: Widths) -> float:
        return 0.0 if self.tied else self._bytes(widths)

    def work(self, node: Node, at: OpStep) -> OpWork:
        return OpWork("linear", self._bytes(at.widths), 2.0 * at.num_tokens * self.spec.num_weights)

    def _bytes(self, widths: Widths) -> float:
        untied = widths.head if self.spec.kind == "head" else widths.body
        return self.spec.num_weights * (widths.values if self.tied else untied) / 8
