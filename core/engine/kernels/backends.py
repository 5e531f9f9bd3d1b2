"""Which kernels compute a model: the one place where that is decided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from engine.contracts.graph import Block, Graph, Node
from engine.contracts.ops import Norm, Rope
from engine.kernels.settings import Kernel, Kernels, Lowering
from engine.kernels.torch.ops import single_kernels
from engine.kernels.torch.patterns import torch_sequences
from engine.models.fuse import Fused, Match, Matcher, fused, reads


def kernels_for(execution: str, device: str) -> Kernels:
    """``execution`` of a plan, on a kind of device."""
    if execution == "eager":
        return "torch"
    return "native" if device == "cpu" else "triton"


def fused_graph(graph: Graph, lowering: Lowering) -> Iterator[tuple[Fused[Kernel], ...]]:
    """The blocks of a graph, from the embedding to the head, as calls of kernels."""
    offered = _offered(lowering)
    blocks = (graph.embed, *graph.layers, graph.head)
    for block, read_after in zip(blocks, reads(graph), strict=True):
        yield fused(block, offered, read_after)


def fused_block(block: Block, lowering: Lowering) -> tuple[Fused[Kernel], ...]:
    """A block of which nothing is read but what its last node makes."""
    return fused(block, _offered(lowering), Counter())


def rotations(graph: Graph) -> tuple[Rope, ...]:
    """The distinct rotations of a graph, in order of appearance."""
    found: list[Rope] = []  # not hashable: parameters of a kind are a mapping
    for node in graph.nodes:
        if isinstance(node.op, Rope) and node.op not in found:
            found.append(node.op)
    return tuple(found)


def joins_norms(norms: Iterable[Norm], lowering: Lowering) -> bool:
    """Whether one kernel norms an embedding and hidden states, and joins them."""
    return lowering.kernels == "triton" and all(op.kind == "rms" for op in norms)


def _offered(lowering: Lowering) -> list[tuple[Kernel, Matcher]]:
    return [(kernel, _matcher(kernel, lowering)) for kernel in _kernels(lowering.kernels)]


def _matcher(kernel: Kernel, lowering: Lowering) -> Matcher:
    def match(nodes: Sequence[Node]) -> Match | None:
        found = kernel.match(nodes)
        if found is None or (kernel.suits is not None and not kernel.suits(lowering, found.what)):
            return None
        return found

    return match


def _kernels(kernels: Kernels) -> tuple[Kernel, ...]:
    """Of kernels for equally many ops the first is taken. Triton and the C++ functions are imported if they are
    used."""
    if kernels == "reference":
        return single_kernels()
    if kernels == "native":
        from engine.kernels.cpu.patterns import cpu_kernels

        return (*cpu_kernels(), *single_kernels())
    if kernels == "triton":
        from engine.kernels.triton.patterns import triton_kernels

        return (*triton_kernels(), *torch_sequences(), *single_kernels())
    return (*torch_sequences(), *single_kernels())
