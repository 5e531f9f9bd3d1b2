"""The language in which an architecture writes a model down, and the graph that comes of it.

.. code-block:: python

    def describe(self, model: ModelConfig, b: Builder) -> None:
        sizes = read_sizes(Values(model.raw))
        b.positions(sizes.max_position)
        x = b.embed("model.embed_tokens", sizes.vocab_size, sizes.hidden_size)
        for i in range(sizes.num_layers):
            with b.layer(x):
                h = b.rms_norm(x, f"model.layers.{i}.input_layernorm", sizes.eps)
                ...
                x = b.add(x, b.linear(a, LinearPart(f"model.layers.{i}.self_attn.o_proj", sizes.hidden_size)))
        b.lm_head(b.rms_norm(x, "model.norm", sizes.eps), "lm_head", sizes.vocab_size)

From the graph alone come the tensors that are read, their cuts, memory, the cache, and which kernels run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, overload

from engine.contracts.ops import (
    MOST_TAPS,
    Act,
    Activation,
    Add,
    Attention,
    DeltaRule,
    Embed,
    Experts,
    FusedExperts,
    Gate,
    Gated,
    HeadJoin,
    HeadLinear,
    HeadSlice,
    KVWrite,
    Linear,
    LinearPart,
    LinearSpec,
    Norm,
    Op,
    PositionScale,
    Rope,
    RopeFacts,
    Route,
    Router,
    Scale,
    ScaleBy,
    ShortConv,
    Slice,
    SoftCap,
    TorchFunction,
)
from engine.contracts.ops.base import Node as Node
from engine.contracts.ops.caches import EVERY_TOKEN as EVERY_TOKEN
from engine.contracts.ops.caches import Cached as Cached
from engine.contracts.ops.caches import KVSpec as KVSpec
from engine.contracts.ops.caches import Reach as Reach
from engine.contracts.ops.caches import StateSpec as StateSpec
from engine.contracts.ops.caches import TokenShare as TokenShare

Shard = Literal["out", "in", "none"]


@dataclass(frozen=True, slots=True)
class Value:
    """What an op computes: ``[num_tokens, size]``."""

    number: int
    size: int


@dataclass(frozen=True, slots=True)
class Block:
    """Nodes in the order in which they are computed."""

    nodes: tuple[Node, ...]
    residual: int | None = None
    """Of a layer: the value that enters it as the residual stream. Of an embedding that layers elsewhere read: what
    enters the first of them."""


@dataclass(frozen=True, slots=True)
class Graph:
    """A model, or layers of a drafter: what comes before the layers, each layer, and what comes after them."""

    inputs: tuple[int, ...]
    """Values that are handed in: of a model the tokens, int64 ``[num_tokens]``."""
    embed: Block
    layers: tuple[Block, ...]
    head: Block
    sizes: tuple[int, ...]
    """Features of each value."""
    caches: tuple[Cached, ...]
    """In the order in which they are written."""
    max_position: int = 0
    """Most tokens of a sequence; 0: not said."""
    ignored: tuple[str, ...] = ()
    """How names of tensors begin that the checkpoint may have and the model does not read."""
    handed_on: tuple[int, ...] = ()
    """Of layers that others follow elsewhere: the values that those read, the residual stream first."""
    received: tuple[int, ...] = ()
    """Of layers that follow others elsewhere: the values that those hand on; then the tokens are not embedded."""

    @property
    def nodes(self) -> Iterator[Node]:
        """All, in order."""
        return chain(self.embed.nodes, *(layer.nodes for layer in self.layers), self.head.nodes)

    @property
    def embedding(self) -> Embed:
        """Of the tokens."""
        return next(node.op for node in self.embed.nodes if isinstance(node.op, Embed))

    @property
    def lm_head(self) -> Linear:
        """The vocabulary projection."""
        heads = (node.op for node in self.head.nodes if isinstance(node.op, Linear) and node.op.spec.kind == "head")
        return next(heads)

    @property
    def entering(self) -> tuple[int, ...]:
        """Values before the layers that layers read: the residual stream that enters the first one, then any others."""
        if self.received or not self.embed.nodes:
            return self.received or self.inputs
        first = self.layers[0].residual if self.layers else None
        before = {number for node in self.embed.nodes for number in node.outputs}
        read = (number for layer in self.layers for node in layer.nodes for number in node.inputs if number in before)
        return tuple(dict.fromkeys((*(() if first is None else (first,)), *read)))

    @property
    def hidden(self) -> int:
        """The value after the last layer: what the head reads first, or what the last layer makes last."""
        if self.handed_on:
            return self.handed_on[0]
        return self.head.nodes[0].inputs[0] if self.head.nodes else self.layers[-1].nodes[-1].outputs[0]

    @property
    def hidden_size(self) -> int:
        return self.sizes[self.hidden]


class Builder:
    """Records a graph. Every method checks what it is given and raises ``ValueError``: values are its own, and their
    sizes fit.

    Names are those of the checkpoint's tensors, without ``.weight`` and ``.bias``.
    """

    def __init__(self, stored: Callable[[], Collection[str]] = tuple) -> None:
        """``stored``: the names of the checkpoint's tensors."""
        self._stored = stored
        self._ignored: list[str] = []
        self._sizes: list[int] = []
        self._inputs: list[int] = []
        self._tokens: Value | None = None
        self._embed: list[Node] = []
        self._layers: list[Block] = []
        self._head: list[Node] = []
        self._caches: list[Cached] = []
        self._max_position = 0
        self._nodes = self._embed
        """Where the next node goes."""

    # Structure -------------------------------------------------------------------------------------------------------

    def positions(self, count: int) -> None:
        """A sequence has at most ``count`` tokens."""
        self._max_position = count

    def has(self, prefix: str) -> bool:
        """Whether the checkpoint has tensors whose names begin so: where one configuration goes with several ways to
        store a model. ``False`` where there is no checkpoint yet."""
        return any(name.startswith(prefix) for name in self._stored())

    def ignore(self, *prefixes: str) -> None:
        """Tensors whose names begin so are not read: an encoder of images, for example. Start-up says so."""
        self._ignored += prefixes

    def input(self, size: int) -> Value:
        """A value that is handed in, for layers that are no whole model."""
        value = self._value(size)
        self._inputs.append(value.number)
        return value

    @contextmanager
    def layer(self, residual: Value) -> Iterator[None]:
        """What is recorded inside is one layer; ``residual``: the stream that enters it. What comes after the last
        layer is the head."""
        if self._nodes is not self._embed and self._nodes is not self._head:
            raise ValueError("a layer inside of a layer")
        if self._nodes is self._head and self._head:
            raise ValueError("a layer after ops that follow the last layer")
        self._check_own(residual)
        self._nodes = []
        yield
        self._layers.append(Block(tuple(self._nodes), residual.number))
        self._nodes = self._head

    def graph(self) -> Graph:
        """What was recorded."""
        return Graph(
            tuple(self._inputs),
            Block(tuple(self._embed)),
            tuple(self._layers),
            Block(tuple(self._head)),
            tuple(self._sizes),
            tuple(self._caches),
            self._max_position,
            tuple(self._ignored),
        )

    # Ops -------------------------------------------------------------------------------------------------------------

    def embed(self, name: str, vocab_size: int, size: int) -> Value:
        """The embedding of the tokens."""
        if self._tokens is None:
            self._tokens = self.input(1)
        return self._add(Embed(name, vocab_size, size), [self._tokens], size)

    def rms_norm(
        self, x: Value, name: str | None, eps: float, *, size: int | None = None, offset: float = 0.0
    ) -> Value:
        """RMSNorm over all features, or over each ``size`` of them: heads. ``offset``: 1 where weights are stored less
        1."""
        return self._norm(x, Norm("rms", name, size or x.size, eps, offset))

    def layer_norm(
        self,
        x: Value,
        name: str | None,
        eps: float,
        *,
        size: int | None = None,
        bias: bool = False,
        by_head: bool = False,
    ) -> Value:
        """LayerNorm over all features, or over each ``size`` of them: heads. ``by_head``: each has a weight of its
        own."""
        size = size or x.size
        return self._norm(x, Norm("layer", name, size, eps, bias=bias, by_head=x.size // size if by_head else 0))

    def _norm(self, x: Value, op: Norm) -> Value:
        self._heads(f"norm {op.name}", x, op.size)
        return self._add(op, [x], x.size)

    @overload
    def linear(self, x: Value, part: LinearPart, /, *, shard: Shard = "none") -> Value: ...

    @overload
    def linear(
        self, x: Value, part: LinearPart, second: LinearPart, /, *more: LinearPart, shard: Shard = "none"
    ) -> tuple[Value, ...]: ...

    def linear(self, x: Value, /, *parts: LinearPart, shard: Shard = "none") -> Value | tuple[Value, ...]:
        """Projections of one input, a value for each part. ``shard``: the axis that tensor parallelism cuts."""
        made = self._linear(x, parts, shard)
        return made if len(parts) > 1 else made[0]

    def _linear(self, x: Value, parts: tuple[LinearPart, ...], shard: Shard) -> tuple[Value, ...]:
        spec = LinearSpec(parts, x.size, shard)
        if not parts:
            raise ValueError("linear of no parts")
        for part in parts:
            if sum(part.outputs) != part.out_features:
                raise ValueError(f"{part.name}: slices {list(part.slices)} of {part.out_features} outputs")
        return self._several(Linear(spec), [x], spec.outputs)

    def split(self, x: Value, part: LinearPart, /, *, shard: Shard = "none") -> tuple[Value, ...]:
        """The slices of one projection that the checkpoint has fused."""
        return self._linear(x, (part,), shard)

    def lm_head(self, x: Value, name: str, vocab_size: int, *, tied: bool = False) -> Value:
        """Logits. ``tied``: the weight is the embedding's, unless the checkpoint stores one of the head's own."""
        tied = tied and not self.has(f"{name}.")
        spec = LinearSpec((LinearPart(name, vocab_size),), x.size, shard="out", kind="head")
        return self._add(Linear(spec, tied), [x], vocab_size)

    def rope(self, q: Value, k: Value, facts: RopeFacts, head_dim: int) -> tuple[Value, Value]:
        """Rotated queries and keys."""
        for value in (q, k):
            self._heads("rope", value, head_dim)
        rotated_q, rotated_k = self._several(Rope(facts, head_dim), [q, k], [q.size, k.size])
        return rotated_q, rotated_k

    def rotate(self, x: Value, facts: RopeFacts, head_dim: int, start: int = 0) -> Value:
        """``x`` with its heads rotated, from dimension ``start`` on."""
        self._heads("rope", x, head_dim)
        return self._add(Rope(facts, head_dim, start), [x], x.size)

    def slice(self, x: Value, start: int, stop: int) -> Value:
        """Features ``start .. stop``."""
        if not 0 <= start < stop <= x.size:
            raise ValueError(f"slice {start} to {stop} of {x.size} features")
        return self._add(Slice(start, stop), [x], stop - start)

    def head_slice(self, x: Value, head_dim: int, start: int, stop: int) -> Value:
        """Dimensions ``start .. stop`` of each head."""
        heads = self._heads("slice", x, head_dim)
        if not 0 <= start < stop <= head_dim:
            raise ValueError(f"slice {start} to {stop} of heads of {head_dim}")
        return self._add(HeadSlice(head_dim, start, stop), [x], heads * (stop - start))

    def head_join(self, a: Value, b: Value, num_heads: int) -> Value:
        """Head by head, those of ``a`` and then those of ``b``."""
        if a.size % num_heads or b.size % num_heads:
            raise ValueError(f"{a.size} and {b.size} features are not {num_heads} heads")
        return self._add(HeadJoin(num_heads), [a, b], a.size + b.size)

    def head_linear(self, x: Value, op: HeadLinear) -> Value:
        """Each head by itself; see :class:`~engine.contracts.ops.HeadLinear`."""
        chosen = op.stop - op.start
        taken, made = (chosen, op.features) if op.transposed else (op.features, chosen)
        if x.size != op.num_heads * taken:
            raise ValueError(f"{op.name}: {x.size} features are not {op.num_heads} heads of {taken}")
        return self._add(op, [x], op.num_heads * made)

    def latent_attention(self, q: Value, k: Value, value_dim: int, *, scale: float) -> Value:
        """Writes keys of one head to a cache of their own, and attends to it with all heads of ``q``; values are the
        first ``value_dim`` numbers of keys: multi-head latent attention (arXiv 2405.04434), projections absorbed."""
        heads = self._heads("attention", q, k.size)
        if not 0 < value_dim <= k.size:
            raise ValueError(f"values of {value_dim} in keys of {k.size}")
        self._check_own(q, k)
        cache = len(self._caches)
        self._caches.append(KVSpec(1, k.size, value_dim=value_dim))
        self._nodes.append(Node(KVWrite(1, k.size), (k.number,), (), cache))
        value = self._add(Attention(heads, 1, k.size, scale, value_dim=value_dim), [q], heads * value_dim)
        self._nodes[-1] = replace(self._nodes[-1], cache=cache)
        return value

    def attention(
        self,
        q: Value,
        k: Value,
        v: Value,
        head_dim: int,
        *,
        scale: float | None = None,
        window: int | None = None,
        chunk: int | None = None,
        soft_cap: float | None = None,
        sinks: str | None = None,
    ) -> Value:
        """Writes keys and values to a cache of their own, and attends to it. ``scale``: ``head_dim ** -0.5`` unless
        given. A ``window`` or a ``chunk`` that holds every sequence is none. ``sinks``: a tensor ``[num_heads]`` of the
        checkpoint, one more logit for the softmax of each head."""
        heads, kv_heads, value_heads = (self._heads("attention", value, head_dim) for value in (q, k, v))
        if kv_heads != value_heads or heads % kv_heads:
            raise ValueError(f"attention of {heads} query, {kv_heads} key and {value_heads} value heads")
        window, chunk = self._forgetting("window", window), self._forgetting("chunk", chunk)
        if window is not None and chunk is not None:
            raise ValueError(f"attention with a window of {window} and chunks of {chunk} tokens, expected one of them")
        if soft_cap is not None:
            self._check_cap("attention", soft_cap)
        self._check_own(q, k, v)
        cache = len(self._caches)
        reach = EVERY_TOKEN if window is None else Reach("window", window)
        reach = reach if chunk is None else Reach("chunked", chunk)
        self._caches.append(KVSpec(kv_heads, head_dim, reach))
        self._nodes.append(Node(KVWrite(kv_heads, head_dim), (k.number, v.number), (), cache))
        scale = head_dim**-0.5 if scale is None else scale
        op = Attention(heads, kv_heads, head_dim, scale, window, soft_cap, sinks=sinks is not None, chunk=chunk)
        value = self._add(op, [q], heads * head_dim)
        self._nodes[-1] = replace(self._nodes[-1], cache=cache, sinks=sinks)
        return value

    def short_conv(self, values: Sequence[Value], name: str, kernel: int, act: Act) -> tuple[Value, ...]:
        """Each feature over the last ``kernel`` tokens; the channels of ``{name}.weight`` are those of ``values``, one
        after another."""
        if not 2 <= kernel <= MOST_TAPS:
            raise ValueError(f"{name}: a convolution over {kernel} tokens, expected 2 to {MOST_TAPS}")
        sizes = [value.size for value in values]
        made = self._several(ShortConv(name, sum(sizes), kernel, act), values, sizes)
        self._keep_state(StateSpec(sum(sizes)))
        return made

    def delta_rule(self, q: Value, k: Value, v: Value, write: Value, decay: Value, op: DeltaRule) -> Value:
        """See :class:`~engine.contracts.ops.DeltaRule`."""
        heads, keys = op.num_heads, op.num_key_heads
        if heads % keys:
            raise ValueError(f"delta rule of {heads} heads and {keys} key heads")
        expected = [keys * op.key_dim, keys * op.key_dim, heads * op.value_dim, heads, heads]
        if (found := [value.size for value in (q, k, v, write, decay)]) != expected:
            raise ValueError(f"delta rule of {found} features, expected {expected}")
        made = self._add(op, [q, k, v, write, decay], v.size)
        self._keep_state(StateSpec(k.size + v.size + heads, heads * op.key_dim * op.value_dim))
        return made

    def attention_to(
        self, cache_of: Value, q: Value, *, scale: float | None = None, soft_cap: float | None = None
    ) -> Value:
        """Attends to the cache that an earlier attention has written, of which ``cache_of`` is what came out, and sees
        what that one sees. ``scale``, ``soft_cap``: as in :meth:`attention`."""
        self._check_own(cache_of, q)
        found = (node for node in self._recorded() if cache_of.number in node.outputs)
        earlier = next((node for node in found if isinstance(node.op, Attention)), None)
        if earlier is None or not isinstance(earlier.op, Attention) or earlier.op.value_dim is not None:
            raise ValueError(f"attention to the cache of {cache_of}: expected what attention() made")
        dim, kv_heads = earlier.op.head_dim, earlier.op.num_kv_heads
        heads = self._heads("attention", q, dim)
        if heads % kv_heads:
            raise ValueError(f"attention of {heads} query heads to a cache of {kv_heads} key heads")
        if soft_cap is not None:
            self._check_cap("attention", soft_cap)
        scale = dim**-0.5 if scale is None else scale
        value = self._add(
            replace(earlier.op, num_heads=heads, scale=scale, soft_cap=soft_cap, sinks=False), [q], q.size
        )
        self._nodes[-1] = replace(self._nodes[-1], cache=earlier.cache)
        return value

    def gated(self, gate: Value, up: Value, act: Act | Gated) -> Value:
        """``act(gate) * up``"""
        return self._alike(act if isinstance(act, Gated) else Gated(act), gate, up)

    def activation(self, x: Value, act: Act) -> Value:
        """``act(x)``"""
        return self._add(Activation(act), [x], x.size)

    def add(self, a: Value, b: Value) -> Value:
        """``a + b``"""
        return self._alike(Add(), a, b)

    def gate(self, x: Value, gate: Value) -> Value:
        """``x * sigmoid(gate)``; ``gate`` has as many features as ``x``, or one."""
        if gate.size not in (1, x.size):
            raise ValueError(f"gate of {gate.size} features for {x.size}")
        return self._add(Gate(), [x, gate], x.size)

    def router(self, x: Value, name: str, num_experts: int, *, bias: bool = False) -> Value:
        """Logits of the experts."""
        return self._add(Router(name, x.size, num_experts, bias), [x], num_experts)

    def experts(
        self,
        x: Value,
        logits: Value,
        route: Route,
        gate_up: tuple[LinearPart, LinearPart],
        down: LinearPart,
        gated: Gated,
        *,
        fused: FusedExperts | None = None,
        weighs_inputs: bool = False,
    ) -> Value:
        """What the experts that ``route`` chooses by ``logits`` make of ``x``. Names of parts have ``{}`` for the
        expert's number. ``weighs_inputs``: weights multiply what experts read."""
        if not 1 <= route.top_k <= route.num_experts or logits.size != route.num_experts:
            raise ValueError(f"{route.top_k} of {route.num_experts} experts, chosen by {logits.size} logits")
        within, rest = divmod(route.num_experts, max(1, route.groups))
        if rest or not 1 <= route.chosen_groups <= route.groups or route.top_k > within * route.chosen_groups:
            raise ValueError(
                f"{route.top_k} experts of {route.chosen_groups} of {route.groups} groups of {route.num_experts}"
            )
        if gated.alpha != 1.0 and gated.act != "silu":
            raise ValueError(f"experts with alpha={gated.alpha} of {gated.act}, expected silu")
        first, second = gate_up
        if first.out_features != second.out_features:
            raise ValueError(f"experts with {first.out_features} gates and {second.out_features} ups")
        ids, weights = self._several(route, [logits], [route.top_k, route.top_k])
        up = LinearSpec(gate_up, x.size, "out", "gate_up" if gated.is_plain else "body")
        low = LinearSpec((down,), first.out_features, "in")
        op = Experts(route.num_experts, route.top_k, up, low, gated, fused, weighs_inputs)
        return self._add(op, [x, ids, weights], down.out_features)

    def position_scale(self, x: Value, beta: float, length: int, *, offset: int = 0) -> Value:
        """``x * (1 + beta * log(1 + floor((position + offset) / length)))``"""
        return self._add(PositionScale(beta, length, offset), [x], x.size)

    def scale(self, x: Value, factor: float, *, rounded: bool = False) -> Value:
        """``factor * x``, with ``rounded`` of a factor in the dtype of ``x``; the value itself for a factor of 1."""
        return x if factor == 1.0 else self._add(Scale(factor, rounded), [x], x.size)

    def scale_by(self, x: Value, name: str, *, by_feature: bool = False) -> Value:
        """``x * tensor``: one number of the checkpoint, or one for each feature."""
        return self._add(ScaleBy(name, x.size if by_feature else 1), [x], x.size)

    def soft_cap(self, x: Value, cap: float | None) -> Value:
        """``cap * tanh(x / cap)``; the value itself without a cap."""
        if cap is None:
            return x
        self._check_cap("soft_cap", cap)
        return self._add(SoftCap(cap), [x], x.size)

    def torch_function(
        self,
        function: str,
        *inputs: Value,
        size: int,
        tensors: Mapping[str, tuple[int, ...]] | None = None,
        by_feature: bool = False,
    ) -> Value:
        """What no other op computes, ``size`` features, by ``function("package.module:function")`` of torch: slower, as
        nothing is fused with it and CPU steps with it are no programs. ``tensors``: names, with ``.weight`` or whatever
        they end in, and shapes. See :class:`~engine.contracts.ops.TorchFunction`."""
        module, _, name = function.partition(":")
        if not all(part.isidentifier() for part in (*module.split("."), name)):
            raise ValueError(f"torch function {function!r}: expected package.module:function")
        sizes = tuple(value.size for value in inputs)
        if not inputs or (by_feature and set(sizes) != {size}):
            raise ValueError(f"torch function {function}: {size} features of inputs of {list(sizes)}, expected as many")
        return self._add(TorchFunction(function, sizes, size, tuple((tensors or {}).items()), by_feature), inputs, size)

    def op(self, op: Op, *inputs: Value, size: int) -> Value:
        """Any op that makes one value, of ``size`` features, and for which there is no method here."""
        return self._add(op, inputs, size)

    # ------------------------------------------------------------------------------------------------------------------

    def _keep_state(self, spec: StateSpec) -> None:
        """The last op has a cache of its own."""
        self._nodes[-1] = replace(self._nodes[-1], cache=len(self._caches))
        self._caches.append(spec)

    def _recorded(self) -> Iterator[Node]:
        """All nodes so far."""
        after = self._nodes if self._nodes is not self._embed else ()
        return chain(self._embed, *(layer.nodes for layer in self._layers), after)

    def _heads(self, what: str, value: Value, head_dim: int) -> int:
        if head_dim < 1 or value.size % head_dim:
            raise ValueError(f"{what}: {value.size} features are not heads of {head_dim}")
        return value.size // head_dim

    def _forgetting(self, what: str, tokens: int | None) -> int | None:
        """A window or a chunk, unless it holds every sequence."""
        if tokens is not None and tokens < 1:
            raise ValueError(f"attention with a {what} of {tokens} tokens, expected at least 1")
        return None if tokens is not None and 0 < self._max_position <= tokens else tokens

    def _check_cap(self, what: str, cap: float) -> None:
        if cap <= 0.0:
            raise ValueError(f"{what} with a cap of {cap}, expected a positive number or None")

    def _check_own(self, *values: Value) -> None:
        for value in values:
            if not (0 <= value.number < len(self._sizes) and self._sizes[value.number] == value.size):
                raise ValueError(f"{value} was made by another builder")

    def _alike(self, op: Op, a: Value, b: Value) -> Value:
        if a.size != b.size:
            raise ValueError(f"{type(op).__name__} of {a.size} and {b.size} features")
        return self._add(op, [a, b], a.size)

    def _add(self, op: Op, inputs: Sequence[Value], size: int) -> Value:
        return self._several(op, inputs, [size])[0]

    def _several(self, op: Op, inputs: Sequence[Value], sizes: Sequence[int]) -> tuple[Value, ...]:
        self._check_own(*inputs)
        made = tuple(self._value(size) for size in sizes)
        self._nodes.append(Node(op, tuple(value.number for value in inputs), tuple(value.number for value in made)))
        return made

    def _value(self, size: int) -> Value:
        if size < 1:
            raise ValueError(f"a value of {size} features, expected at least 1")
        self._sizes.append(size)
        return Value(len(self._sizes) - 1, size)
