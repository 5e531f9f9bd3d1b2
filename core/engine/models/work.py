"""What a rank does in a step, in bytes and operations, from its graph alone: what it reads, multiplies, and exchanges.

Pure arithmetic: how long that takes on a device is :mod:`engine.estimates`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import comb, floor, prod
from typing import Literal

from engine.contracts.graph import Cached, Graph, KVSpec, Node
from engine.contracts.ops import (
    AllGather,
    AllReduce,
    Attention,
    DeltaRule,
    Embed,
    Experts,
    HeadLinear,
    KVWrite,
    Linear,
    LinearSpec,
    Router,
    SharedAttention,
    SumTokens,
)
from engine.models.manifest import Manifest, ManifestEntry
from engine.models.placement import RankGraph
from engine.models.required_tensors import small_tensors_of

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
    """``requests`` requests of ``tokens`` tokens each, behind ``context`` tokens that are cached."""

    requests: int
    tokens: int = 1
    context: int = 0

    def __post_init__(self) -> None:
        if self.requests < 1 or self.tokens < 1 or self.context < 0:
            raise ValueError(
                f"a step of {self.requests} requests with {self.tokens} tokens behind {self.context}: expected at "
                "least 1 request, 1 token and a context of at least 0"
            )

    @property
    def num_tokens(self) -> int:
        return self.requests * self.tokens


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


@dataclass(frozen=True, slots=True)
class RankWork:
    """Of one rank in one step."""

    ops: tuple[OpWork, ...]
    exchanges: tuple[Exchange, ...]
    handed_on: tuple[int, ...]
    """Bytes of each value that goes to the next stage."""
    num_layers: int
    num_mixtures: int
    """Mixtures of experts."""

    @property
    def num_bytes(self) -> float:
        return sum(op.num_bytes for op in self.ops)

    @property
    def flops(self) -> float:
        return sum(op.flops for op in self.ops)


def work_of(rank: RankGraph, step: Step, widths: Widths, ep: int = 1) -> RankWork:
    """What ``rank`` does in ``step``. Of ranks with whole experts (``ep`` shares of them) it counts as the one whose
    experts are chosen most often: the others wait for it."""
    graph, item = rank.graph, widths.values / 8
    ops: list[OpWork] = []
    exchanges: list[Exchange] = []
    # The last stage may hold an embedding that its head shares: the tokens are embedded in the first one.
    for block in (*(() if graph.received else (graph.embed,)), *graph.layers, graph.head):
        # Behind the layers only the last token of each request is computed.
        num_tokens = step.requests if block is graph.head else step.num_tokens
        for node in block.nodes:
            op = node.op
            if isinstance(op, AllReduce | SumTokens):
                exchanges.append(Exchange("all_reduce", int(num_tokens * graph.sizes[node.inputs[0]] * item)))
            elif isinstance(op, AllGather):
                ranks = len(op.shares) if op.group != "tp" else None
                exchanges.append(Exchange("all_gather", int(num_tokens * op.size * item), ranks))
            else:
                if isinstance(op, SharedAttention):
                    exchanges.append(_merge(op, num_tokens))
                cache = None if node.cache is None else graph.caches[node.cache]
                ops.append(_op(node, cache, step, num_tokens, widths, ep))
    handed_on = tuple(int(step.num_tokens * graph.sizes[value] * item) for value in graph.handed_on)
    num_mixtures = sum(op.kind == "experts" for op in ops)
    return RankWork(tuple(ops), tuple(exchanges), handed_on, len(graph.layers), num_mixtures)


def _op(node: Node, cache: Cached | None, step: Step, num_tokens: int, widths: Widths, ep: int) -> OpWork:
    op = node.op
    if isinstance(op, Linear):
        size = _size(op.spec)
        return OpWork("linear", size * _bits(op, widths) / 8, 2.0 * num_tokens * size)
    if isinstance(op, Experts):
        return _experts(op, num_tokens, widths, ep)
    if isinstance(op, HeadLinear):
        size = op.num_heads * (op.stop - op.start) * op.features
        return OpWork("linear", size * widths.values / 8, 2.0 * num_tokens * size)
    if isinstance(op, Router):
        return OpWork("linear", FLOAT32 * op.in_features * op.num_experts, 2.0 * num_tokens * _router_size(op))
    if isinstance(op, Attention | SharedAttention) and isinstance(cache, KVSpec):
        each = op if isinstance(op, Attention) else op.attention
        pairs, keys = _seen(each, step)
        flops = 2.0 * pairs / _token_ranks(cache) * each.num_heads * (each.head_dim + each.out_dim)
        return OpWork("attention", keys * cached_numbers(cache) * widths.kv / 8, flops)
    if isinstance(op, KVWrite) and isinstance(cache, KVSpec):
        return OpWork("attention", num_tokens * cached_numbers(cache) * widths.kv / 8, 0.0)
    if isinstance(op, DeltaRule):  # a state is read and written for each request, and computed with for each token
        state = op.num_heads * op.key_dim * op.value_dim
        return OpWork("attention", 2.0 * step.requests * state * FLOAT32, 6.0 * num_tokens * state)
    if isinstance(op, Embed):
        return OpWork("other", num_tokens * op.size * widths.values / 8, 0.0)
    return OpWork("other", float(sum(prod(shape) for _, shape in small_tensors_of(node)) * FLOAT32), 0.0)


def _merge(op: SharedAttention, num_tokens: int) -> Exchange:
    """Outputs of a rank's own heads and their log-sum-exp, float32, of all ranks that share out tokens."""
    ranks, (first, last) = len(op.shares), op.shares[op.index]
    received = ranks * num_tokens * (last - first) * (op.attention.out_dim + 1) * FLOAT32
    return Exchange("all_to_all", received, ranks)


def _experts(op: Experts, num_tokens: int, widths: Widths, ep: int) -> OpWork:
    whole = op.num_experts if op.held is None else op.held.whole
    touched = touched_experts(whole, op.top_k, num_tokens)
    here = touched if op.held is None else busiest_share(whole, ep, touched)
    size = _size(op.gate_up) + _size(op.down)
    pairs = num_tokens * op.top_k * here / touched
    return OpWork("experts", here * size * widths.experts / 8, 2.0 * pairs * size)


def touched_experts(num_experts: int, top_k: int, num_tokens: int) -> float:
    """How many experts so many tokens are routed to, if each goes to any ``top_k`` alike: real routers repeat
    themselves, and touch fewer."""
    return num_experts * (1.0 - (1.0 - top_k / num_experts) ** num_tokens)


def busiest_share(num_experts: int, shares: int, touched: float) -> float:
    """Of ``touched`` experts, any alike, how many the share with most of them has, on average. Shares are as equal as
    can be, as :func:`engine.models.placement.place` makes them."""
    below = floor(touched)
    rest = touched - below
    most = _busiest(num_experts, shares, below)
    return most if rest == 0.0 else (1.0 - rest) * most + rest * _busiest(num_experts, shares, below + 1)


@lru_cache(maxsize=1024)
def _busiest(num_experts: int, shares: int, touched: int) -> float:
    """The mean of the maximum: of all ways to choose ``touched`` experts, how many leave no share with more than
    ``most`` is a coefficient of a product of polynomials."""
    each, larger = divmod(num_experts, shares)
    sizes = [each + (i < larger) for i in range(shares)]
    total, mean = comb(num_experts, touched), 0.0
    for most in range(min(touched, max(sizes))):
        ways = [1]
        for size in sizes:
            ways = _product(ways, [comb(size, count) for count in range(min(size, most) + 1)], touched)
        mean += 1.0 - (ways[touched] / total if touched < len(ways) else 0.0)
    return mean


def _product(a: list[int], b: list[int], degree: int) -> list[int]:
    """Of two polynomials, up to ``degree``."""
    found = [0] * min(len(a) + len(b) - 1, degree + 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b[: len(found) - i]):
            found[i + j] += x * y
    return found


def _seen(op: Attention, step: Step) -> tuple[int, int]:
    """Pairs of a query and a key that it sees, and keys that are read, of all requests together."""
    first, end = step.context, step.context + step.tokens
    if op.window is not None:
        pairs, keys = _seen_in_window(end, op.window) - _seen_in_window(first, op.window), op.window + step.tokens - 1
    elif op.chunk is not None:
        pairs, keys = (
            _seen_in_chunks(end, op.chunk) - _seen_in_chunks(first, op.chunk),
            end - first // op.chunk * op.chunk,
        )
    else:
        pairs, keys = _triangle(end) - _triangle(first), end
    return step.requests * pairs, step.requests * min(keys, end)


def _triangle(count: int) -> int:
    return count * (count + 1) // 2


def _seen_in_window(count: int, window: int) -> int:
    """Keys that the first ``count`` tokens see."""
    return _triangle(min(count, window)) + max(0, count - window) * window


def _seen_in_chunks(count: int, chunk: int) -> int:
    whole, rest = divmod(count, chunk)
    return whole * _triangle(chunk) + _triangle(rest)


def cached_numbers(spec: KVSpec) -> float:
    """Of one token: its key and, unless it is part of that, its value, of all heads; on average where ranks share out
    tokens."""
    return spec.num_kv_heads * spec.head_dim * (1 if spec.value_dim is not None else 2) / _token_ranks(spec)


def _token_ranks(spec: KVSpec) -> int:
    return 1 if spec.tokens is None else spec.tokens.ranks


def held_bytes(graph: Graph, widths: Widths) -> int:
    """Weights of one rank. ``graph``: its own."""
    return int(sum(weight.numbers * _held_bits(weight, widths) / 8 for weight in Manifest().weights(graph)))


def _held_bits(weight: ManifestEntry, widths: Widths) -> float:
    if weight.kind == "linear":
        return widths.head if weight.spec is not None and weight.spec.kind == "head" else widths.body
    if weight.kind == "expert":
        return widths.experts
    return 8 * FLOAT32 if weight.kind == "small" else widths.values


def _bits(op: Linear, widths: Widths) -> float:
    if op.tied:
        return widths.values
    return widths.head if op.spec.kind == "head" else widths.body


def _size(spec: LinearSpec) -> int:
    return spec.in_features * spec.out_features


def _router_size(op: Router) -> int:
    return op.in_features * op.num_experts
