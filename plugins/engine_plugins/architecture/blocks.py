"""What many families share: attention and feed-forward networks as sequences of ops."""

from __future__ import annotations

from engine.checkpoint.files import clipped
from engine.checkpoint.sizes import DecoderSizes
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


def activation(name: str, key: str = "hidden_act") -> Act:
    """Raises ``ValueError`` for one that no op computes."""
    if name not in ACTIVATIONS:
        raise ValueError(f"{key} {clipped(name)} of the checkpoint: expected one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


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
    sinks: str | None = None,
) -> Value:
    """Grouped-query attention with ``{name}.{q,k,v,o}_proj``; ``head_norm``: RMSNorm of each query and key head
    (``{name}.{q,k}_norm``) before the rotation."""
    dim = sizes.head_dim
    widths = (("q", sizes.num_heads * dim), ("k", sizes.num_kv_heads * dim), ("v", sizes.num_kv_heads * dim))
    q_proj, k_proj, v_proj = (LinearPart(f"{name}.{part}_proj", width, bias) for part, width in widths)
    q, k, v = b.linear(h, q_proj, k_proj, v_proj, shard="out")
    if head_norm:
        q = b.rms_norm(q, f"{name}.q_norm", sizes.eps, size=dim)
        k = b.rms_norm(k, f"{name}.k_norm", sizes.eps, size=dim)
    if rope is not None:
        q, k = b.rope(q, k, rope, dim)
    a = b.attention(q, k, v, dim, scale=scale, window=window, sinks=sinks)
    return b.linear(a, LinearPart(f"{name}.o_proj", sizes.hidden_size, out_bias), shard="in")


def gated_mlp(
    b: Builder, h: Value, name: str, sizes: DecoderSizes, act: Act, *, size: int | None = None, bias: bool = False
) -> Value:
    """``down_proj(act(gate_proj(h)) * up_proj(h))``; ``size``: of the gate, where it is not the model's."""
    inner = size or sizes.intermediate_size
    gate_proj, up_proj = (LinearPart(f"{name}.{part}_proj", inner, bias) for part in ("gate", "up"))
    gate, up = b.linear(h, gate_proj, up_proj, shard="out")
    return b.linear(b.gated(gate, up, act), LinearPart(f"{name}.down_proj", sizes.hidden_size, bias), shard="in")


def experts(b: Builder, h: Value, name: str, sizes: DecoderSizes, route: Route, size: int, act: Act) -> Value:
    """A mixture of gated networks ``{name}.experts.N.{gate,up,down}_proj`` of ``size`` features, of which ``route``
    chooses by ``{name}.gate``."""
    gate_proj, up_proj = (LinearPart(f"{name}.experts.{{}}.{part}_proj", size) for part in ("gate", "up"))
    down_proj = LinearPart(f"{name}.experts.{{}}.down_proj", sizes.hidden_size)
    fused = FusedExperts(f"{name}.experts.gate_up_proj", f"{name}.experts.down_proj")
    logits = b.router(h, f"{name}.gate", route.num_experts)
    return b.experts(h, logits, route, (gate_proj, up_proj), down_proj, Gated(act), fused=fused)
