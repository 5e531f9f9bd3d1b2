"""What many families share: attention and feed-forward networks as sequences of ops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.checkpoint.files import CheckpointError, clipped
from engine.checkpoint.sizes import DecoderSizes
from engine.checkpoint.values import Values
from engine.contracts.graph import Builder, Value
from engine.contracts.ops import Act, LinearPart, RopeFacts

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


def activation(name: str, key: str = "hidden_act") -> Act:
    """Raises ``ValueError`` for one that no op computes."""
    if name not in ACTIVATIONS:
        raise ValueError(f"{key} {name!r} of the checkpoint: expected one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def expect(values: Values, expected: Mapping[str, Any]) -> None:
    """Raise :class:`CheckpointError` where a key says something else than what is computed. Missing keys are fine."""
    for key, value in expected.items():
        if values.has(key) and values.values[key] != value:
            raise CheckpointError(f"{key}={clipped(values.values[key])} of the checkpoint: expected {value!r}")


def expect_whole_rotation(sizes: DecoderSizes) -> None:
    """Raise :class:`CheckpointError` where only a part of each head is rotated."""
    if sizes.rope.rotary_dim is not None:
        share = sizes.rope.rotary_dim / sizes.head_dim
        raise CheckpointError(f"partial_rotary_factor={share:g} of the checkpoint: expected 1, heads rotated whole")


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
    scale: float | None = None,
) -> Value:
    """Grouped-query attention with ``{name}.{q,k,v,o}_proj``; ``head_norm``: RMSNorm of each query and key head
    (``{name}.{q,k}_norm``) before the rotation."""
    q, k, v = qkv_projections(b, h, name, sizes, bias=bias)
    if head_norm:
        q = b.rms_norm(q, f"{name}.q_norm", sizes.eps, size=sizes.head_dim)
        k = b.rms_norm(k, f"{name}.k_norm", sizes.eps, size=sizes.head_dim)
    return attend(b, q, k, v, name, sizes, rope=rope, window=window, bias=out_bias, scale=scale)


def qkv_projections(
    b: Builder, h: Value, name: str, sizes: DecoderSizes, *, bias: bool = False
) -> tuple[Value, Value, Value]:
    """Queries, keys and values: ``{name}.{q,k,v}_proj``."""
    widths = zip("qkv", qkv_widths(sizes), strict=True)
    q, k, v = b.linear(h, *(LinearPart(f"{name}.{part}_proj", width, bias) for part, width in widths), shard="out")
    return q, k, v


def qkv_widths(sizes: DecoderSizes) -> tuple[int, int, int]:
    """Features of queries, keys and values."""
    kv_size = sizes.num_kv_heads * sizes.head_dim
    return sizes.num_heads * sizes.head_dim, kv_size, kv_size


def attend(
    b: Builder,
    q: Value,
    k: Value,
    v: Value,
    name: str,
    sizes: DecoderSizes,
    *,
    rope: RopeFacts | None,
    window: int | None = None,
    bias: bool = False,
    scale: float | None = None,
) -> Value:
    """Rotation, attention and ``{name}.o_proj``."""
    if rope is not None:
        q, k = b.rope(q, k, rope, sizes.head_dim)
    a = b.attention(q, k, v, sizes.head_dim, scale=scale, window=window)
    return b.linear(a, LinearPart(f"{name}.o_proj", sizes.hidden_size, bias), shard="in")


def gated_mlp(
    b: Builder, h: Value, name: str, sizes: DecoderSizes, act: Act, *, size: int | None = None, bias: bool = False
) -> Value:
    """``down_proj(act(gate_proj(h)) * up_proj(h))``; ``size``: of the gate, where it is not the model's."""
    inner = size or sizes.intermediate_size
    gate_proj, up_proj = (LinearPart(f"{name}.{part}_proj", inner, bias) for part in ("gate", "up"))
    gate, up = b.linear(h, gate_proj, up_proj, shard="out")
    return b.linear(b.gated(gate, up, act), LinearPart(f"{name}.down_proj", sizes.hidden_size, bias), shard="in")
