"""Which of the C++ between linear layers a graph needs. Imports no torch: it is compiled while that is imported.

As :mod:`engine.kernels.cpu.patterns` and :mod:`engine.kernels.cpu.ops` choose kernels. What is missing here is
compiled when it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from engine.contracts import ops
from engine.contracts.graph import Graph, Node
from engine.kernels import patterns
from engine.models.fuse import Match, fused, reads
from engine.native import ACTIVATIONS, Source
from engine.native.calls import SOURCE as CALLS

LAYER, ROW, ELEMENTWISE, HEAD, EXPERT, RECURRENT = (
    Source(Path(__file__).with_name(f"{name}.cpp"))
    for name in ("layer_ops", "row_ops", "elementwise", "head_ops", "expert_ops", "recurrent")
)
ALWAYS = (ROW, CALLS)
NONE: tuple[Source, ...] = ()


def rms(*norms: ops.Norm | None) -> bool:
    """Whether all that are there are RMSNorms."""
    return all(norm is None or norm.kind == "rms" for norm in norms)


def graph_sources(graph: Graph) -> tuple[Source, ...]:
    """Of a model that runs on the C++ kernels."""
    found = dict.fromkeys(_fused(graph))
    return (*found, *(source for source in ALWAYS if source not in found))


def _fused(graph: Graph) -> Iterator[Source]:
    blocks = (graph.embed, *graph.layers, graph.head)
    for block, read_after in zip(blocks, reads(graph), strict=True):
        for one in fused(block, _OFFERED, read_after):
            yield from one.kernel


def _single(nodes: Sequence[Node]) -> Match | None:
    return Match(nodes[0].op, 1)


def _of(kinds: tuple[type[ops.Op], ...]) -> Callable[[Sequence[Node]], Match | None]:
    return lambda nodes: Match(nodes[0].op, 1) if isinstance(nodes[0].op, kinds) else None


def _if(
    match: Callable[[Sequence[Node]], Match | None], suits: Callable[[Any], bool]
) -> Callable[[Sequence[Node]], Match | None]:
    def matching(nodes: Sequence[Node]) -> Match | None:
        found = match(nodes)
        return found if found is not None and suits(found.what) else None

    return matching


_OFFERED = (
    ((LAYER,), _if(patterns.qkv_write, lambda what: rms(what.norm, what.q_norm, what.k_norm))),
    ((LAYER,), _if(patterns.gate_up, lambda what: rms(what.norm) and what.act in ACTIVATIONS)),
    (NONE, patterns.linear_add),
    ((LAYER,), _if(patterns.norm_head, lambda what: rms(what.norm))),
    ((EXPERT,), patterns.choose_experts),
    ((EXPERT,), patterns.mix_experts),
    ((RECURRENT,), _if(patterns.delta_network, lambda what: what.conv.act == "silu")),
    ((HEAD,), _of((ops.HeadSlice, ops.HeadJoin, ops.HeadLinear))),
    ((EXPERT,), _of((ops.CountExperts,))),
    (
        (ELEMENTWISE,),
        _of(
            (
                *(ops.Norm, ops.Rope, ops.KVWrite, ops.Gated, ops.Activation, ops.Add, ops.Gate, ops.PositionScale),
                *(ops.Scale, ops.ScaleBy, ops.SoftCap),
            )
        ),
    ),
    (NONE, _single),
)
