"""What the core asks of every op, and an op's place in a graph.

Passes over a graph ask the op: which tensors it reads, its linear layers, how ranks share it out, its work in a step,
its memory. An op answers in its own file where the answer differs from the one here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Protocol

from engine.contracts.ops.caches import Cached
from engine.contracts.ops.linear_spec import LinearSpec
from engine.contracts.ops.values import Cut
from engine.contracts.ops.work import FLOAT32, Exchange, OpStep, OpWork, Widths

TensorShape = tuple[str, tuple[int, ...]]
"""A tensor of the checkpoint: its whole name, and its shape."""


class Mine(Protocol):
    """What one rank has of the values that an op reads and makes."""

    def __call__(self, size: int) -> Cut:
        """The rank's own of ``size`` heads, or features."""

    def keys(self, count: int) -> int:
        """How many of ``count`` key heads the rank has, of the cache that its queries read."""


@dataclass(frozen=True, slots=True)
class Op:
    """One step of a computation. What is said here holds for an op without weights that needs all features of its
    inputs."""

    needs_positions: ClassVar[bool] = False
    """It asks where tokens are, which is known in layers alone."""
    keeps_state: ClassVar[bool] = False
    """It caches a state, not keys."""
    writes_keys: ClassVar[bool] = False
    """It writes the keys that attention reads."""
    each_alone: ClassVar[bool] = False
    """It computes each output of one input, and ranks may share these out differently."""

    @property
    def title(self) -> str:
        """Its name in labels: ``kv_write``."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", type(self).__name__).lower()

    # Weights ---------------------------------------------------------------------------------------------------------

    @property
    def tensors(self) -> Iterable[TensorShape]:
        """The tensors of the checkpoint that it reads as they are, whole, in float32 or the compute dtype."""
        return ()

    def reads(self, node: Node) -> Iterable[TensorShape]:
        """The same, with what ``node``, which is this op's, names."""
        return self.tensors

    @property
    def own_rows(self) -> Cut | None:
        """Rows of :attr:`tensors` that one rank has; ``None``: all."""
        return None

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """Its linear layers, in the order in which they are packed."""
        return ()

    @property
    def projections(self) -> tuple[LinearSpec, ...]:
        """Layers whose weights it reads as numbers, whatever form they are stored in. Ops may read different rows of
        one."""
        return ()

    def held_bytes(self, node: Node, widths: Widths) -> float:
        """Bytes of its weights on the device, without :attr:`projections`."""
        small = float(sum(prod(shape) for _, shape in self.reads(node)) * FLOAT32)
        return small + sum(spec.num_weights for spec in self.linears) * widths.body / 8

    @property
    def weights_of_a_token(self) -> int:
        """Weights of linear layers that a single token is multiplied by."""
        return sum(spec.num_weights for spec in self.linears)

    # Ranks -----------------------------------------------------------------------------------------------------------

    def parts(self, size: int) -> int | None:
        """Into how many equal parts its inputs and outputs fall of which each is computed by itself: heads, or
        features. ``None``: it needs all features. ``size``: features of its first input."""
        return None

    @property
    def kv_heads_read(self) -> int:
        """Key heads of the cache that it attends to; 0: it reads no keys."""
        return 0

    def of_rank(self, node: Node, mine: Mine) -> Node:
        """``node``, which is this op's, as a rank computes it that has some of :meth:`parts`."""
        return node

    def cached(self, spec: Cached) -> Cached:
        """What a rank caches of ``spec``, where this is the op of that rank."""
        return spec

    # Work and memory -------------------------------------------------------------------------------------------------

    def work(self, node: Node, at: OpStep) -> OpWork | None:
        """What it does in a step; ``None``: it only exchanges."""
        return OpWork("other", self.held_bytes(node, at.widths), 2.0 * at.num_tokens * self.weights_of_a_token)

    def exchange(self, node: Node, at: OpStep) -> Exchange | None:
        """What ranks exchange for it."""
        return None

    def beside(self, inputs: int) -> int:
        """Features that it needs for a token beside its inputs and outputs. ``inputs``: features of all inputs."""
        return 0


@dataclass(frozen=True, slots=True)
class Node:
    """One op of a graph, with the numbers of the values that it reads and makes."""

    op: Op
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    cache: int | None = None
    """Which of :attr:`engine.contracts.graph.Graph.caches` the op writes or reads, if any."""
    sinks: str | None = None
    """Of attention with sinks: the tensor with the logits, ``[num_heads]``."""
    heads: Cut | None = None
    """Of attention that ranks share out: those of one rank."""
