"""The sizes that decoders of almost every family state under the same keys of ``config.json``."""

from __future__ import annotations

from dataclasses import dataclass

from engine.checkpoint.files import CheckpointError, clipped
from engine.checkpoint.rope import read_reach, read_rope
from engine.checkpoint.values import Values
from engine.contracts.ops import RopeFacts

_REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """Widths in features, heads of attention, and positions."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position: int
    """Positions that the rotation reaches."""
    rope: RopeFacts
    eps: float
    """Of norms."""
    tied: bool
    """The head's weight is the embedding's."""


def read_sizes(
    values: Values,
    *,
    tied: bool = False,
    eps: float = 1e-6,
    eps_key: str = "rms_norm_eps",
    layer_type: str | None = None,
) -> DecoderSizes:
    """``tied``, ``eps``: the family's defaults; ``layer_type``: the layers whose rotation is read, where they differ.
    Raises :class:`CheckpointError` naming the key that is missing or odd."""
    missing = [key for key in _REQUIRED if not values.has(key)]
    if missing:
        raise CheckpointError(f"config.json lacks {', '.join(missing)}")
    hidden_size = values.whole("hidden_size", "MAX_HIDDEN_SIZE")
    heads = values.whole("num_attention_heads", "MAX_HEADS")
    head_dim = values.whole("head_dim", "MAX_HEAD_DIM", hidden_size // heads)
    kv_heads = values.whole("num_key_value_heads", "MAX_HEADS", heads)
    if heads % kv_heads:
        raise CheckpointError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    stated = values.whole("max_position_embeddings", "MAX_POSITION", 2048, least=2)
    rope = read_rope(values, head_dim, stated, layer_type)
    return DecoderSizes(
        vocab_size=values.whole("vocab_size", "MAX_VOCAB"),
        hidden_size=hidden_size,
        num_layers=values.whole("num_hidden_layers", "MAX_LAYERS"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=values.whole("intermediate_size", "MAX_INTERMEDIATE_SIZE"),
        max_position=read_reach(stated, rope),
        rope=rope,
        eps=values.number(eps_key, "MAX_EPS", eps),
        tied=values.flag("tie_word_embeddings", tied),
    )


def windows_by_layer(values: Values, layers: int, *, every: bool = False) -> tuple[int | None, ...]:
    """The attention window of each layer in tokens, where ``sliding_window`` and ``layer_types`` say so; ``None``: full
    attention. ``every``: without ``layer_types``, ``sliding_window`` is that of every layer. Raises
    :class:`CheckpointError` for other kinds of layers."""
    window = values.whole("sliding_window", "MAX_POSITION") if values.has("sliding_window") else None
    if not values.has("layer_types"):
        return (window if every else None,) * layers
    types = values.texts("layer_types", "MAX_LAYERS")
    if len(types) != layers:
        raise CheckpointError(f"layer_types has {len(types)} entries for {layers} layers")
    if unknown := set(types) - {"sliding_attention", "full_attention"}:
        raise CheckpointError(f"layer_types {clipped(sorted(unknown))}: expected sliding_attention or full_attention")
    if window is None and "sliding_attention" in types:
        raise CheckpointError("sliding_window is missing: expected one for the sliding_attention of layer_types")
    return tuple(window if kind == "sliding_attention" else None for kind in types)
