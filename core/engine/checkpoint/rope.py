"""The rotary position embedding that a checkpoint states, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.checkpoint.files import CheckpointError, clipped
from engine.checkpoint.limits import MAX_POSITION, MAX_ROPE_NUMBER
from engine.checkpoint.values import Values
from engine.contracts.ops import RopeFacts

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")
_NEEDS_ORIGINAL = ("dynamic", "yarn", "llama3", "longrope")
_ORIGINAL, _STATED = "original_max_position_embeddings", "max_position_embeddings"
_ROPE_NUMBERS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": (),
    "proportional": (),
}
"""What each kind cannot do without."""
_ROPE_OPTIONS = ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def read_rope(values: Values, head_dim: int, stated: int, layer_type: str | None = None) -> RopeFacts:
    """Both spellings: ``rope_theta`` + ``rope_scaling``, and the newer ``rope_parameters``, which may differ by type of
    layer.

    ``stated``: the positions that the checkpoint states; ``layer_type``: for which layers, as ``layer_types`` has it;
    ``None``: all layers must rotate alike. Raises :class:`CheckpointError`.
    """
    given = _given(values, layer_type)
    scaling = Values(given)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    kind = {"su": "longrope"}.get(kind, kind)
    if kind not in ROPE_KINDS:
        raise CheckpointError(f"rope type {clipped(kind)}: expected one of {', '.join(ROPE_KINDS)}")
    base = values.number("rope_theta", "MAX_ROPE_THETA", 1e4, least=1)
    theta = scaling.number("rope_theta", "MAX_ROPE_THETA", base, least=1)
    partial = values.number("partial_rotary_factor", "MAX_SHARE", 1.0)
    share = scaling.number("partial_rotary_factor", "MAX_SHARE", partial)
    rotary_dim = head_dim if kind == "proportional" else int(head_dim * share)
    if rotary_dim < 4 or rotary_dim % 2:
        raise CheckpointError(f"{rotary_dim} dimensions of each head are rotated: expected an even number, at least 4")
    _check_rope(kind, scaling, rotary_dim)
    known = ("type", "rope_type", "rope_theta", "partial_rotary_factor")
    params = {key: value for key, value in given.items() if key not in known}
    if kind == "proportional":  # pairs are those of the whole head, and a share of them is rotated
        params["partial_rotary_factor"] = share
    for key, otherwise in ((_ORIGINAL, values.whole(_ORIGINAL, "MAX_POSITION", stated, least=2)), (_STATED, stated)):
        length = scaling.whole(key, "MAX_POSITION", otherwise, least=2)
        if kind in _NEEDS_ORIGINAL:
            params[key] = length
    return RopeFacts(theta=theta, kind=kind, rotary_dim=None if rotary_dim == head_dim else rotary_dim, params=params)


def _given(values: Values, layer_type: str | None) -> Mapping[str, Any]:
    """What the checkpoint states for layers of one type."""
    parameters = values.section("rope_parameters")
    given = {**values.section("rope_scaling").values, **parameters.values}
    by_type = [key for key, value in given.items() if isinstance(value, Mapping)]
    if not by_type:
        return given
    if layer_type is None:
        raise CheckpointError(f"rope_parameters differ by layer type ({clipped(by_type)}): expected one for all layers")
    if values.has("rope_scaling"):
        raise CheckpointError("rope_scaling where rotations differ by layer type: expected rope_parameters alone")
    if layer_type not in by_type:
        raise CheckpointError(f"rope_parameters has no {layer_type!r}: found {clipped(by_type)}")
    return parameters.section(layer_type).values


def _check_rope(kind: str, scaling: Values, rotary_dim: int) -> None:
    """Raise :class:`CheckpointError` for numbers that a rotation of this kind cannot be computed from."""
    for key in _ROPE_NUMBERS[kind]:
        if not scaling.has(key):
            raise CheckpointError(f"rope type {kind!r} has no {key!r}")
    for key in (*_ROPE_NUMBERS[kind], *(key for key in _ROPE_OPTIONS if scaling.values.get(key))):
        scaling.number(key, "MAX_ROPE_NUMBER", least=1 / MAX_ROPE_NUMBER)
    if kind == "llama3" and scaling.values["high_freq_factor"] <= scaling.values["low_freq_factor"]:
        raise CheckpointError("rope type 'llama3' has a high_freq_factor that is not larger than its low_freq_factor")
    if kind == "longrope":
        for key in ("short_factor", "long_factor"):
            scaling.numbers(key, "MAX_ROPE_NUMBER", rotary_dim // 2, least=1 / MAX_ROPE_NUMBER)


def read_reach(stated: int, rope: RopeFacts) -> int:
    """Positions the rotation reaches. Scaled kinds state the length before scaling, except llama3 and longrope. Beyond
    that length ``dynamic`` rotates keys by the length of the whole text: they could not be cached.

    Raises :class:`CheckpointError` for more than can be.
    """
    reach = stated
    if rope.kind == "linear":
        reach = int(stated * float(rope.params["factor"]))
    if rope.kind == "yarn":
        reach = max(stated, int(rope.params[_ORIGINAL] * float(rope.params["factor"])))
    if not 1 <= reach <= MAX_POSITION:
        raise CheckpointError(
            f"rope type {rope.kind!r} with factor={rope.params['factor']} reaches {reach} positions: expected 1 to "
            f"{MAX_POSITION} (MAX_POSITION)"
        )
    return reach
