"""Attention over the paged cache, and what it caches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from engine.contracts.ops.base import Mine, Node, Op, TensorShape
from engine.contracts.ops.caches import Cached, KVSpec
from engine.contracts.ops.values import Cut, Range
from engine.contracts.ops.work import FLOAT32, Exchange, OpStep, OpWork, Step


@dataclass(frozen=True, slots=True)
class KVWrite(Op):
    """``(keys, values)`` go into the cache; ``(keys,)`` where values are the first part of them. No output."""

    num_kv_heads: int
    head_dim: int
    heads: Cut | None = None
    """Of one rank; ``num_kv_heads`` is then how many it has."""

    needs_positions: ClassVar[bool] = True
    writes_keys: ClassVar[bool] = True

    def parts(self, size: int) -> int:
        return self.num_kv_heads

    def of_rank(self, node: Node, mine: Mine) -> Node:
        heads = mine(self.num_kv_heads)
        return replace(node, op=replace(self, num_kv_heads=heads.size, heads=heads))

    def cached(self, spec: Cached) -> Cached:
        assert isinstance(spec, KVSpec)
        return replace(spec, num_kv_heads=self.num_kv_heads)

    def work(self, node: Node, at: OpStep) -> OpWork:
        assert isinstance(at.cache, KVSpec)
        return OpWork("attention", at.num_tokens * at.cache.numbers * at.widths.kv / 8, 0.0)


@dataclass(frozen=True, slots=True)
class Attention(Op):
    """``queries -> [num_tokens, num_heads * out_dim]``: causal attention over what is in the cache; ``window`` in
    tokens, ``scale`` multiplies q·k, ``soft_cap`` bounds it: ``cap * tanh(score / cap)``.

    A query at position ``p`` sees keys from :meth:`first_key` to ``p``."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    value_dim: int | None = None
    """Values are the first ``value_dim`` numbers of keys, and so is what comes out; ``None``: values of ``head_dim``
    are cached beside keys."""
    sinks: bool = False
    """Each head has one more logit, of no key, in its softmax: probabilities of keys then sum up to less than 1."""
    chunk: int | None = None
    """Queries see keys of their own chunk alone: chunks of so many tokens follow one another from the first token on.
    Not beside a ``window``."""

    @property
    def out_dim(self) -> int:
        """Of a head that comes out."""
        return self.head_dim if self.value_dim is None else self.value_dim

    def first_key(self, position: Any) -> Any:
        """The first key that a query at ``position`` sees; below 0 where its window begins before the sequence. Of a
        number, or of an integer tensor."""
        if self.chunk is not None:
            return position - position % self.chunk
        return 0 * position if self.window is None else position - self.window + 1

    needs_positions: ClassVar[bool] = True

    def reads(self, node: Node) -> Iterable[TensorShape]:
        return _sinks(node, self.num_heads)

    @property
    def kv_heads_read(self) -> int:
        return self.num_kv_heads

    def parts(self, size: int) -> int:
        return self.num_heads

    def of_rank(self, node: Node, mine: Mine) -> Node:
        heads = mine(self.num_heads)
        op = replace(self, num_heads=heads.size, num_kv_heads=mine.keys(self.num_kv_heads))
        return replace(node, op=op, heads=heads)

    def work(self, node: Node, at: OpStep) -> OpWork:
        assert isinstance(at.cache, KVSpec)
        pairs, keys = self.seen(at.step)
        flops = 2.0 * pairs / at.cache.ranks * self.num_heads * (self.head_dim + self.out_dim)
        return OpWork("attention", keys * at.cache.numbers * at.widths.kv / 8, flops)

    def seen(self, step: Step) -> tuple[int, int]:
        """Pairs of a query and a key that it sees, and keys that are read, of all requests together."""
        first, end = step.context, step.context + step.tokens
        keys = end
        if self.window is not None:
            keys = self.window + step.tokens - 1
        elif self.chunk is not None:
            keys = end - first // self.chunk * self.chunk
        return step.requests * (self._pairs(end) - self._pairs(first)), step.requests * min(keys, end)

    def _pairs(self, count: int) -> int:
        """Keys that the first ``count`` tokens see, together."""
        if self.window is not None:
            return _triangle(min(count, self.window)) + max(0, count - self.window) * self.window
        if self.chunk is not None:
            whole, rest = divmod(count, self.chunk)
            return whole * _triangle(self.chunk) + _triangle(rest)
        return _triangle(count)


def _triangle(count: int) -> int:
    return count * (count + 1) // 2


def _sinks(node: Node, num_heads: int) -> Iterable[TensorShape]:
    if node.sinks is not None:
        yield node.sinks, (num_heads if node.heads is None else node.heads.whole,)


@dataclass(frozen=True, slots=True)
class SharedAttention(Op):
    """``queries -> [num_tokens, own heads * out_dim]``: attention where each rank of the group ``dcp`` caches other
    tokens. Queries are those of all its ranks, and what comes out is that of a rank's own heads, of all keys."""

    attention: Attention
    """Of the queries of all ranks of the group, without sinks."""
    shares: tuple[Range, ...]
    """By rank of the group, the heads among these that are its own."""
    index: int
    """Which of them this rank is."""
    sinks: bool = False
    """As of :class:`Attention`: counted once, of all keys together."""

    def reads(self, node: Node) -> Iterable[TensorShape]:
        return _sinks(node, self.attention.num_heads)

    def work(self, node: Node, at: OpStep) -> OpWork:
        return self.attention.work(node, at)

    def exchange(self, node: Node, at: OpStep) -> Exchange:
        """Outputs of a rank's own heads and their log-sum-exp, float32, of all ranks that share out tokens."""
        ranks, (first, last) = len(self.shares), self.shares[self.index]
        received = ranks * at.num_tokens * (last - first) * (self.attention.out_dim + 1) * FLOAT32
        return Exchange("all_to_all", received, ranks)
