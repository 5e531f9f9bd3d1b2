"""Rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from engine.contracts.ops.base import Op


@dataclass(frozen=True, slots=True)
class RopeFacts:
    """Rotary position embedding of a checkpoint (RoFormer, arXiv 2104.09864).

    ``kind`` is ``default``, ``linear``, ``dynamic``, ``yarn``, ``llama3``, ``longrope`` or ``proportional``; ``params``
    holds that kind's own numbers under their ``rope_scaling``/``rope_parameters`` names.
    """

    theta: float = 10000.0
    kind: str = "default"
    rotary_dim: int | None = None
    """Rotated part of each head; ``None`` means all of ``head_dim``."""
    interleaved: bool = False
    """Neighbours ``(2i, 2i + 1)`` are rotated together, as in the paper, instead of ``(i, i + rotary_dim / 2)``."""
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rope(Op):
    """Rotary positions (arXiv 2104.09864) of each head of each input."""

    facts: RopeFacts
    head_dim: int
    start: int = 0
    """First dimension of a head that is rotated."""

    needs_positions: ClassVar[bool] = True
    each_alone: ClassVar[bool] = True

    def parts(self, size: int) -> int:
        return size // self.head_dim
