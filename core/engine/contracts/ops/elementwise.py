"""Ops that compute each feature by itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from engine.contracts.ops.base import Op, TensorShape
from engine.contracts.ops.values import Act


@dataclass(frozen=True, slots=True)
class ByFeature(Op):
    """Each feature of the output follows from the same feature of the inputs."""

    def parts(self, size: int) -> int | None:
        return size


@dataclass(frozen=True, slots=True)
class Gated(ByFeature):
    """``(gate, up) -> act(gate) * (up + offset)`` (arXiv 2002.05202)."""

    act: Act
    limit: float | None = None
    """Before that, gates are cut to at most ``limit``, and ups to at most ``limit`` on both sides of 0."""
    alpha: float = 1.0
    """Of ``silu``: ``x * sigmoid(alpha * x)``."""
    offset: float = 0.0

    @property
    def is_plain(self) -> bool:
        """``act(gate) * up`` and nothing else."""
        return self == Gated(self.act)


@dataclass(frozen=True, slots=True)
class Activation(ByFeature):
    """``act(x)``"""

    act: Act


@dataclass(frozen=True, slots=True)
class Add(ByFeature):
    """``a + b``"""


@dataclass(frozen=True, slots=True)
class Gate(ByFeature):
    """``(x, gate) -> x * sigmoid(gate)``; one gate may serve all features."""


@dataclass(frozen=True, slots=True)
class PositionScale(ByFeature):
    """``x * (1 + beta * log(1 + floor((position + offset) / length)))``, each token by its position: queries that see
    more than ``length`` tokens."""

    beta: float
    length: int
    offset: int = 0

    needs_positions: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Scale(ByFeature):
    """``factor * x``"""

    factor: float
    rounded: bool = False
    """The factor is rounded to the dtype of ``x`` first."""


@dataclass(frozen=True, slots=True)
class ScaleBy(ByFeature):
    """``x * tensor``, one of the checkpoint named ``name``: ``[size]``, a number for each feature, or one for all."""

    name: str
    size: int

    @property
    def tensors(self) -> Iterable[TensorShape]:
        return ((self.name, (self.size,)),)

    def parts(self, size: int) -> int | None:
        return size if self.size == 1 else None


@dataclass(frozen=True, slots=True)
class SoftCap(ByFeature):
    """``cap * tanh(x / cap)``"""

    cap: float
