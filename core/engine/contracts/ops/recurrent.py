"""Ops that keep a state of a sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from engine.contracts.ops.base import Node, Op, TensorShape
from engine.contracts.ops.values import Act
from engine.contracts.ops.work import FLOAT32, OpStep, OpWork

MOST_TAPS = 8
"""Of a convolution: no KV block is smaller, so the tokens that it reads lie in two."""

STATE_RESULTS = 6
"""What a recurrent op in torch makes of its inputs, in their features: float32 copies, and blocks of heads."""


@dataclass(frozen=True, slots=True)
class ShortConv(Op):
    """``(x, ...) ->`` as many: ``act`` of a causal convolution of every feature by itself over the last ``kernel``
    tokens, at most :data:`MOST_TAPS`; ``{name}.weight [features of all inputs, 1, kernel]``, the newest token last."""

    name: str
    features: int
    kernel: int
    act: Act

    needs_positions: ClassVar[bool] = True
    keeps_state: ClassVar[bool] = True

    @property
    def tensors(self) -> Iterable[TensorShape]:
        return ((f"{self.name}.weight", (self.features, 1, self.kernel)),)

    def beside(self, inputs: int) -> int:
        return STATE_RESULTS * inputs


@dataclass(frozen=True, slots=True)
class DeltaRule(Op):
    """``(q, k, v, write, decay) -> [num_tokens, num_heads * value_dim]``: the gated delta rule (arXiv 2412.06464).

    ``q`` and ``k`` have ``num_key_heads`` heads of ``key_dim``, each for ``num_heads / num_key_heads`` heads of ``v``
    of ``value_dim``; ``write`` and ``decay`` are one number a head. A head's state ``S [key_dim, value_dim]`` begins as
    0. Of each token, with ``q`` and ``k`` divided by their lengths, ``b = sigmoid(write)`` and ``g = -exp({rate}) *
    softplus(decay + {bias})``: ``S = exp(g) * S``, ``S = S + k (b * (v - S.T k)).T``, and ``S.T q / sqrt(key_dim)``
    comes out. All in float32. ``rate`` and ``bias`` name tensors of the checkpoint, ``[num_heads]``.
    """

    num_key_heads: int
    key_dim: int
    num_heads: int
    value_dim: int
    rate: str
    bias: str

    needs_positions: ClassVar[bool] = True
    keeps_state: ClassVar[bool] = True

    @property
    def tensors(self) -> Iterable[TensorShape]:
        return ((name, (self.num_heads,)) for name in (self.rate, self.bias))

    def work(self, node: Node, at: OpStep) -> OpWork:
        """A state is read and written for each request, and computed with for each token."""
        state = self.num_heads * self.key_dim * self.value_dim
        return OpWork("attention", 2.0 * at.step.requests * state * FLOAT32, 6.0 * at.num_tokens * state)

    def beside(self, inputs: int) -> int:
        return STATE_RESULTS * inputs
