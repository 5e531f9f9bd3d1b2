"""Sequences of ops that backends have fused kernels for, and how they are found in a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.contracts.graph import Node
from engine.contracts.ops import (
    Act,
    Add,
    Attention,
    DeltaRule,
    Experts,
    Gated,
    HeldExperts,
    KVWrite,
    Linear,
    LinearSpec,
    Norm,
    OwnExperts,
    Rope,
    Route,
    Router,
    ShortConv,
)
from engine.models.fuse import Match


@dataclass(frozen=True, slots=True)
class QKVWrite:
    """``x -> queries``: norm, projections to queries, keys and values, norm of query and key heads, rotation, and the
    write into the cache; all but projections and write may be missing."""

    norm: Norm | None
    qkv: LinearSpec
    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: Norm | None
    k_norm: Norm | None
    rope: Rope | None
    cache: int

    @property
    def rotary_dim(self) -> int:
        return 0 if self.rope is None else self.rope.facts.rotary_dim or self.head_dim


@dataclass(frozen=True, slots=True)
class GateUp:
    """``x -> act(gate) * up`` of projections of the normed input."""

    norm: Norm
    gate_up: LinearSpec
    act: Act


@dataclass(frozen=True, slots=True)
class LinearAdd:
    """``(x, residual) -> residual + linear(x)``"""

    linear: LinearSpec


@dataclass(frozen=True, slots=True)
class NormHead:
    """``residual -> logits``: the final norm and the vocabulary projection."""

    norm: Norm
    head: Linear


def qkv_write(nodes: Sequence[Node]) -> Match | None:
    """A :class:`QKVWrite`."""
    rest = _Cursor(nodes)
    norm = rest.take(Norm)
    linear = rest.take(Linear, norm.outputs if norm else None)
    if linear is None or len(linear.outputs) != 3:
        return None
    q, k, v = linear.outputs
    q_norm = rest.take(Norm, (q,))
    q = q_norm.outputs[0] if q_norm else q
    k_norm = rest.take(Norm, (k,))
    k = k_norm.outputs[0] if k_norm else k
    rope = rest.take(Rope, (q, k))
    q, k = rope.outputs if rope else (q, k)
    write = rest.take(KVWrite, (k, v))
    if write is None or write.cache is None:
        return None
    spec, op = linear.op.spec, write.op
    found = QKVWrite(
        norm=norm and norm.op,
        qkv=spec,
        num_heads=spec.outputs[0] // op.head_dim,
        num_kv_heads=op.num_kv_heads,
        head_dim=op.head_dim,
        q_norm=q_norm and q_norm.op,
        k_norm=k_norm and k_norm.op,
        rope=rope and rope.op,
        cache=write.cache,
    )
    norms = (each for each in (found.q_norm, found.k_norm) if each is not None)
    by_head = all(each.size == op.head_dim and not each.by_head for each in norms)
    paired = found.rope is None or not found.rope.facts.interleaved
    return Match(found, rest.count, (spec,)) if by_head and paired else None


def gate_up(nodes: Sequence[Node]) -> Match | None:
    """A :class:`GateUp`."""
    rest = _Cursor(nodes)
    norm = rest.take(Norm)
    linear = rest.take(Linear, norm.outputs) if norm else None
    gated = rest.take(Gated, linear.outputs) if linear else None
    if norm is None or linear is None or gated is None or not gated.op.is_plain:
        return None
    if len(linear.outputs) != 2:
        return None
    spec = replace(linear.op.spec, kind="gate_up")
    return Match(GateUp(norm.op, spec, gated.op.act), rest.count, (spec,))


def linear_add(nodes: Sequence[Node]) -> Match | None:
    """A :class:`LinearAdd`."""
    rest = _Cursor(nodes)
    linear = rest.take(Linear)
    add = rest.take(Add) if linear else None
    if linear is None or add is None or linear.op.tied or len(linear.outputs) != 1:
        return None
    # The residual comes first, and is another value.
    if add.inputs[1] != linear.outputs[0] or add.inputs[0] in (*linear.outputs, *linear.inputs):
        return None
    return Match(LinearAdd(linear.op.spec), rest.count, (linear.op.spec,))


def norm_head(nodes: Sequence[Node]) -> Match | None:
    """A :class:`NormHead`."""
    rest = _Cursor(nodes)
    norm = rest.take(Norm)
    linear = rest.take(Linear, norm.outputs) if norm else None
    if norm is None or linear is None or linear.op.spec.kind != "head":
        return None
    return Match(NormHead(norm.op, linear.op), rest.count, (linear.op.spec,))


@dataclass(frozen=True, slots=True)
class ChooseExperts:
    """``x -> (ids, weights)``: a router's logits, and what is chosen by them."""

    router: Router
    route: Route
    held: HeldExperts | None = None
    """As :class:`~engine.contracts.ops.OwnExperts` has it, where that follows."""


@dataclass(frozen=True, slots=True)
class MixExperts:
    """``(x, ids, weights) ->`` what experts make of it; with ``adds`` also ``residual``, to which it is added."""

    experts: Experts
    adds: bool


def choose_experts(nodes: Sequence[Node]) -> Match | None:
    """A :class:`ChooseExperts`."""
    rest = _Cursor(nodes)
    router = rest.take(Router)
    route = rest.take(Route, router.outputs) if router else None
    if router is None or route is None:
        return None
    return Match(ChooseExperts(router.op, route.op), rest.count)


def choose_own_experts(nodes: Sequence[Node]) -> Match | None:
    """A :class:`ChooseExperts` of one rank's experts."""
    rest = _Cursor(nodes)
    router = rest.take(Router)
    route = rest.take(Route, router.outputs) if router else None
    own = rest.take(OwnExperts, route.outputs) if route else None
    if router is None or route is None or own is None:
        return None
    return Match(ChooseExperts(router.op, route.op, own.op.held), rest.count)


def mix_experts(nodes: Sequence[Node]) -> Match | None:
    """A :class:`MixExperts`."""
    rest = _Cursor(nodes)
    experts = rest.take(Experts)
    if experts is None:
        return None
    add, (made,) = rest.take(Add), experts.outputs
    adds = add is not None and add.inputs[1] == made and add.inputs[0] not in (made, *experts.inputs)
    return Match(MixExperts(experts.op, adds), 2 if adds else 1, experts.op.linears)


@dataclass(frozen=True, slots=True)
class NormMixture:
    """``x -> x + what experts make of its norm``, which only the router and they read."""

    norm: Norm
    choose: ChooseExperts
    experts: Experts


def norm_mixture(nodes: Sequence[Node]) -> Match | None:
    """A :class:`NormMixture`."""
    rest = _Cursor(nodes)
    norm = rest.take(Norm)
    router = rest.take(Router, norm.outputs) if norm else None
    route = rest.take(Route, router.outputs) if router else None
    if norm is None or router is None or route is None:
        return None
    experts = rest.take(Experts, (*norm.outputs, *route.outputs))
    add = rest.take(Add, (*norm.inputs, *experts.outputs)) if experts else None
    if experts is None or add is None:
        return None
    what = NormMixture(norm.op, ChooseExperts(router.op, route.op), experts.op)
    return Match(what, rest.count, experts.op.linears)


@dataclass(frozen=True, slots=True)
class DeltaNetwork:
    """``(q, k, v, write, decay) -> what comes out``: convolutions of three values, and the delta rule of them."""

    conv: ShortConv
    rule: DeltaRule
    caches: tuple[int, int]
    """Of the convolution, and of the rule."""


def delta_network(nodes: Sequence[Node]) -> Match | None:
    """A :class:`DeltaNetwork`."""
    rest = _Cursor(nodes)
    conv = rest.take(ShortConv)
    rule = rest.take(DeltaRule) if conv else None
    if conv is None or rule is None or rule.inputs[:3] != conv.outputs:
        return None
    return Match(DeltaNetwork(conv.op, rule.op, (conv.cache, rule.cache)), rest.count)


def attention(nodes: Sequence[Node]) -> Match | None:
    """One :class:`~engine.contracts.ops.Attention`."""
    return Match(nodes[0], 1) if isinstance(nodes[0].op, Attention) else None


class _Cursor:
    """The nodes of a sequence, taken one after another."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self.count = 0

    def take(self, kind: type[Any], inputs: tuple[int, ...] | None = None) -> Any | None:
        """The next node, if its op is of this kind and it reads ``inputs``."""
        node = self._nodes[self.count] if self.count < len(self._nodes) else None
        if node is None or not isinstance(node.op, kind) or inputs not in (None, node.inputs):
            return None
        self.count += 1
        return node
