"""Which kernel computes which ops of a graph: the longest sequence that some kernel has comes first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from engine.contracts.graph import Block, Graph, Node
from engine.contracts.ops import LinearSpec

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Match:
    """The first nodes of a sequence, as a kernel understands them."""

    what: Any
    """What the kernel needs to know of them."""
    count: int
    linears: tuple[LinearSpec, ...] = ()
    """The linear layers among them, as their weights are to be packed."""


@dataclass(frozen=True, slots=True)
class Fused(Generic[K]):
    """Nodes that one kernel computes."""

    kernel: K
    what: Any
    """See :attr:`Match.what`."""
    nodes: tuple[Node, ...]
    linears: tuple[LinearSpec, ...]
    inputs: tuple[int, ...]
    """Values that it reads, in the order of the nodes that read them."""
    outputs: tuple[int, ...]
    """Values that others read."""
    last_use: frozenset[int]
    """Inputs that nobody reads after it: their memory may be overwritten, unless it is the caller's."""

    @property
    def title(self) -> str:
        """``norm, linear, rope, kv_write``"""
        return ", ".join(node.op.title for node in self.nodes)


Matcher = Callable[[Sequence[Node]], "Match | None"]


def fused(block: Block, kernels: Sequence[tuple[K, Matcher]], read_after: Counter[int]) -> tuple[Fused[K], ...]:
    """``block`` as calls of kernels. ``kernels``, each with what it matches: the first of those that match most wins.
    ``read_after``: how often a value is read by other blocks. Raises ``ValueError`` for an op that no kernel has."""
    readers = Counter(number for node in block.nodes for number in node.inputs) + read_after
    found: list[Fused[K]] = []
    start = 0
    while start < len(block.nodes):
        rest = block.nodes[start:]
        matches = [(kernel, match) for kernel, matcher in kernels if (match := matcher(rest)) is not None]
        matches = [pair for pair in matches if _is_closed(rest[: pair[1].count], readers)]
        if not matches:
            raise ValueError(f"no kernel computes {type(rest[0].op).__name__}")
        kernel, match = max(matches, key=lambda pair: pair[1].count)  # the first of equals
        nodes = rest[: match.count]
        inputs, outputs = _border(nodes)
        for node in nodes:
            readers.subtract(node.inputs)
        last_use = frozenset(number for number in inputs if not readers[number])
        made = tuple(number for number in outputs if readers[number] > 0 or number in nodes[-1].outputs)
        found.append(Fused(kernel, match.what, nodes, match.linears, inputs, made, last_use))
        start += match.count
    return tuple(found)


def reads(graph: Graph) -> list[Counter[int]]:
    """For each block of a graph, from its embedding to its head: how often values are read by the blocks after it."""
    blocks = (graph.embed, *graph.layers, graph.head)
    after: list[Counter[int]] = []
    total = Counter(graph.handed_on)
    for block in reversed(blocks):
        after.append(Counter(total))
        total.update(number for node in block.nodes for number in node.inputs)
    return after[::-1]


def _is_closed(nodes: Sequence[Node], readers: Counter[int]) -> bool:
    """Nobody else reads what is made on the way: all but what the last node makes, and what no node here reads."""
    inside = Counter(number for node in nodes for number in node.inputs)
    made = [number for node in nodes[:-1] for number in node.outputs]
    return all(inside[number] in (0, readers[number]) for number in made)


def _border(nodes: Sequence[Node]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Values that some nodes read of others, and values that they make."""
    made = [number for node in nodes for number in node.outputs]
    needed = [number for node in nodes for number in node.inputs if number not in made]
    return tuple(dict.fromkeys(needed)), tuple(made)
