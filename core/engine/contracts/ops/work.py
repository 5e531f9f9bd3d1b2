"""What an op of a rank does in a step, in bytes and operations: pure arithmetic, without a device's speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from engine.contracts.ops.caches import Cached

FLOAT32 = 4
"""Bytes: of norms, routers and other small tensors, and of recurrent states."""


@dataclass(frozen=True, slots=True)
class Widths:
    """Bits of a number in memory, shares of scales included."""

    body: float = 16.0
    """Weights of linear layers, but for those below."""
    experts: float = 16.0
    head: float = 16.0
    """Of the vocabulary projection, if it is not tied."""
    kv: float = 16.0
    values: float = 16.0
    """Of what is computed, embeddings and tied heads: the compute dtype."""


@dataclass(frozen=True, slots=True)
class Step:
    """``requests`` requests of ``tokens`` tokens each, after ``context`` tokens that are cached."""

    requests: int
    tokens: int = 1
    context: int = 0

    def __post_init__(self) -> None:
        if self.requests < 1 or self.tokens < 1 or self.context < 0:
            raise ValueError(
                f"a step of {self.requests} requests with {self.tokens} tokens after {self.context}: expected at "
                "least 1 request, 1 token and a context of at least 0"
            )

    @property
    def num_tokens(self) -> int:
        return self.requests * self.tokens


@dataclass(frozen=True, slots=True)
class OpStep:
    """What an op is told of a step."""

    step: Step
    num_tokens: int
    """Tokens that reach the op: those of the step, or the last one of each request."""
    widths: Widths
    sizes: Sequence[int]
    """Features of each value of the graph."""
    cache: Cached | None = None
    """The cache that the op writes or reads, if any."""
    ep: int = 1
    """Shares of experts that ranks hold whole."""

    def value_bytes(self, features: float) -> float:
        """Bytes of so many features of every token, in the compute dtype."""
        return self.num_tokens * features * self.widths.values / 8


@dataclass(frozen=True, slots=True)
class OpWork:
    """Of one op on one rank."""

    kind: Literal["linear", "experts", "attention", "other"]
    num_bytes: float
    """Read from memory, and for a cache also written. Activations are left out."""
    flops: float


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective."""

    kind: Literal["all_reduce", "all_gather", "all_to_all"]
    num_bytes: int
    """Of the sum, of everything gathered, or of everything that a rank receives."""
    ranks: int | None = None
    """That take part; ``None``: all of a stage."""
