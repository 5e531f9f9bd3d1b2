"""What many families share: attention and feed-forward networks as sequences of ops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.checkpoint.files import CheckpointError, clipped
from engine.checkpoint.sizes import DecoderSizes
from engine.checkpoint.values import Values
from engine.contracts.graph import Builder, Value
from engine.contracts.ops import Act, FusedExperts, Gated, LinearPart, RopeFacts, Route

ACTIVATIONS: dict[str, Act] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
"""Names of ``config.json`` -> the activation of the op."""
FULL, SLIDING = "full_attention", "sliding_attention"
"""Types of layers in ``config.json``."""


def activation(name: str, key: str = "hidden_act") -> Act:
    """Raises ``ValueError`` for one that no op computes."""
    if name not in ACTIVATIONS:
        raise ValueError(f"{key} {clipped(name)} of the checkpoint: expected one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def expect(values: Values, expected: Mapping[str, Any]) -> None:
    """Raise :class:`CheckpointError` where a key says something else than what is computed. Missing keys are fine."""
    for key, value in expected.items():
        if values.has(key) and values.values[key] != value:
            raise CheckpointError(f"{key}={clipped(values.values[key])}: expected {value!r}")


def expect_whole_rotation(sizes: DecoderSizes) -> None:
    """Raise :class:`CheckpointError` where only a part of each head is rotated."""
    if sizes.rope.rotary_dim is not None:
        share = sizes.rope.rotary_dim / sizes.head_dim
        raise CheckpointError(f"partial_rotary_factor={share:g}: expected 1, heads that are rotated whole")


def expect_full_attention(values: Values) -> None:
    """Raise :class:`CheckpointError` where layers have types, and one is not that of full attention."""
    types = values.texts("layer_types", "MAX_LAYERS")
    if others := sorted(set(types) - {FULL}):
        raise CheckpointError(f"layer_types {clipped(others)}: expected {FULL}")


def expect_plain_layers(values: Values, sizes: DecoderSizes) -> None:
    """Raise :class:`CheckpointError` unless all layers rotate heads whole and attend to everything."""
    expect_whole_rotation(sizes)
    expect_full_attention(values)


def no_windows(values: Values, layers: int) -> tuple[None, ...]:
    """Of a model all of whose layers attend to everything. Raises as :func:`expect_full_attention`."""
    expect_full_attention(values)
    return (None,) * layers


def ignore_mtp(b: Builder, values: Values, layers: int, *published: int) -> None:
    """Layers that predict further tokens lie after the last one and are not read: as many as
    ``num_nextn_predict_layers`` says, and those at numbers that transformers ignores, whatever it says
    (``published``)."""
    count = values.whole("num_nextn_predict_layers", "MAX_LAYERS", 0, least=0)
    numbers = {*range(layers, layers + count), *(number for number in published if number >= layers)}
    b.ignore(*(f"model.layers.{number}." for number in sorted(numbers)))


def with_layer_types(values: Values) -> Values:
    """``values`` with ``layer_types``: where they are missing, each ``sliding_window_pattern``-th layer has no window,
    and the others have one."""
    if values.has("layer_types"):
        return values
    layers = values.whole("num_hidden_layers", "MAX_LAYERS")
    pattern = values.whole("sliding_window_pattern", "MAX_LAYERS")
    types = [SLIDING if (i + 1) % pattern else FULL for i in range(layers)]
    return Values({**values.values, "layer_types": types})


def rotated_layers(values: Values, layers: int) -> tuple[bool, ...]:
    """Which layers rotate: 1 in ``no_rope_layers``, whatever its name says; without, all but each
    ``no_rope_layer_interval``-th."""
    if not values.has("no_rope_layers"):
        interval = values.whole("no_rope_layer_interval", "MAX_LAYERS")
        return tuple((i + 1) % interval != 0 for i in range(layers))
    stated = values.wholes("no_rope_layers", "MAX_LAYERS", largest="MAX_SHARE")
    if len(stated) < layers:
        raise CheckpointError(f"no_rope_layers has {len(stated)} entries for {layers} layers")
    return tuple(each == 1 for each in stated[:layers])


def qkv_proj(b: Builder, h: Value, name: str, sizes: DecoderSizes, *, bias: bool = False) -> tuple[Value, ...]:
    """Queries, keys and values by ``{name}.{q,k,v}_proj``"""
    queries, keys = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    widths = {"q": queries, "k": keys, "v": keys}
    parts = (LinearPart(f"{name}.{part}_proj", width, bias) for part, width in widths.items())
    return b.linear(h, *parts, shard="out")


def o_proj(b: Builder, a: Value, name: str, sizes: DecoderSizes, *, bias: bool = False) -> Value:
    """``{name}.o_proj``, from heads to the residual stream."""
    return b.linear(a, LinearPart(f"{name}.o_proj", sizes.hidden_size, bias), shard="in")


def attention(
    b: Builder,
    h: Value,
    name: str,
    sizes: DecoderSizes,
    *,
    rope: RopeFacts | None,
    window: int | None = None,
    bias: bool = False,
    out_bias: bool = False,
    head_norm: bool = False,
    norm_offset: float = 0.0,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: str | None = None,
) -> Value:
    """Grouped-query attention with ``{name}.{q,k,v,o}_proj``; ``head_norm``: RMSNorm of each query and key head
    (``{name}.{q,k}_norm``, stored less ``norm_offset``) before the rotation."""
    dim = sizes.head_dim
    q, k, v = qkv_proj(b, h, name, sizes, bias=bias)
    if head_norm:
        q = b.rms_norm(q, f"{name}.q_norm", sizes.eps, size=dim, offset=norm_offset)
        k = b.rms_norm(k, f"{name}.k_norm", sizes.eps, size=dim, offset=norm_offset)
    if rope is not None:
        q, k = b.rope(q, k, rope, dim)
    a = b.attention(q, k, v, dim, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks)
    return o_proj(b, a, name, sizes, bias=out_bias)


def gated_mlp(
    b: Builder, h: Value, name: str, sizes: DecoderSizes, act: Act, *, size: int | None = None, bias: bool = False
) -> Value:
    """``down_proj(act(gate_proj(h)) * up_proj(h))``; ``size``: of the gate, where it is not the model's."""
    inner = size or sizes.intermediate_size
    gate_proj, up_proj = (LinearPart(f"{name}.{part}_proj", inner, bias) for part in ("gate", "up"))
    gate, up = b.linear(h, gate_proj, up_proj, shard="out")
    return b.linear(b.gated(gate, up, act), LinearPart(f"{name}.down_proj", sizes.hidden_size, bias), shard="in")


def top_k(values: Values, count: int, default: int | None = None, key: str = "num_experts_per_tok") -> int:
    """Experts of a token, of ``count``."""
    chosen = values.whole(key, "MAX_EXPERTS", default)
    if chosen > count:
        raise CheckpointError(f"{key}={chosen}: expected at most {count}, as many experts as there are")
    return chosen


def expert_groups(values: Values, count: int, chosen: int) -> tuple[int, int]:
    """Groups, and those that are chosen: ``count`` experts in ``n_group`` groups, of which ``topk_group`` have
    at least the ``chosen`` ones of a token."""
    groups = values.whole("n_group", "MAX_EXPERTS", 1)
    if count % groups:
        raise CheckpointError(f"n_group={groups}: expected a number that divides {count} experts")
    most, least = groups, -(-chosen * groups // count)
    of_them = values.whole("topk_group", "MAX_EXPERTS", 1)
    if not least <= of_them <= most:
        raise CheckpointError(f"topk_group={of_them}: expected {least} to {most} of n_group={groups}")
    return groups, of_them


def experts(b: Builder, h: Value, name: str, sizes: DecoderSizes, route: Route, size: int, act: Act) -> Value:
    """A mixture of gated networks ``{name}.experts.N.{gate,up,down}_proj`` of ``size`` features, of which ``route``
    chooses by ``{name}.gate``."""
    gate_proj, up_proj = (LinearPart(f"{name}.experts.{{}}.{part}_proj", size) for part in ("gate", "up"))
    down_proj = LinearPart(f"{name}.experts.{{}}.down_proj", sizes.hidden_size)
    fused = FusedExperts(f"{name}.experts.gate_up_proj", f"{name}.experts.down_proj")
    logits = b.router(h, f"{name}.gate", route.num_experts)
    return b.experts(h, logits, route, (gate_proj, up_proj), down_proj, Gated(act), fused=fused)
