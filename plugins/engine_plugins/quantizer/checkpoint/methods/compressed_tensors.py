"""compressed-tensors, the format of llm-compressor (https://github.com/vllm-project/compressed-tensors).

``config_groups`` says how (``weights``, ``input_activations``, ``format``) and for which layers (``targets``),
``ignore`` which of them are left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine_plugins.quantizer.checkpoint import names
from engine_plugins.quantizer.checkpoint.fields import Fields
from engine_plugins.quantizer.checkpoint.scheme import Activations, Recipe, Scheme

METHOD = "compressed-tensors"
PACKED = "pack-quantized"
PLAIN = ("int-quantized", "float-quantized", "naive-quantized")
SEVERAL = "mixed-precision"
WHY_NOT = {
    "nvfp4-pack-quantized": "4-bit floating point (NVFP4) is not supported",
    "mxfp4-pack-quantized": "4-bit floating point (MXFP4) is not supported",
    "mxfp6-pack-quantized": "6-bit floating point (MXFP6) is not supported",
    "mxfp8-quantized": "8-bit floating point with power-of-two scales (MXFP8) is not supported",
    "marlin-24": "2:4 sparse weights are not supported",
    "sparse-24-bitmask": "2:4 sparse weights are not supported",
    "sparse-bitmask": "sparse weights are not supported",
    "dense": "the weights are not stored in quantized form; save the checkpoint compressed",
    "fakequant": "the weights are not stored in quantized form; save the checkpoint compressed",
}


@dataclass(frozen=True, slots=True)
class _Group:
    targets: tuple[str, ...]
    scheme: Scheme | None


def parse(fields: Fields) -> Recipe:
    """The recipe of a ``quantization_config`` with ``quant_method=compressed-tensors``."""
    _refuse_transforms(fields)
    common = fields.text("format", "dense").lower()
    groups = _groups(fields, common)
    ignore = fields.names("ignore")
    kv = fields.section("kv_cache_scheme")
    kv_is_fp8 = kv is None or (kv.text("type", "int").lower(), kv.integer("num_bits", 8)) == ("float", 8)

    def scheme_of(name: str, is_head: bool) -> Scheme | None:
        if any(names.targets(name, entry) for entry in ignore):
            return None
        return _first_match(name, groups)

    schemes = tuple(dict.fromkeys(group.scheme for group in groups if group.scheme is not None))
    return Recipe(METHOD, scheme_of, schemes, kv_is_fp8, tuple(fields.problems))


def _refuse_transforms(fields: Fields) -> None:
    if fields.values.get("transform_config"):
        fields.refuse("transform_config: weights that were rotated (transforms) are not supported")
    sparsity = fields.section("sparsity_config")
    if sparsity is not None and sparsity.text("format", "dense").lower() != "dense":
        sparsity.refuse(f"format={sparsity.text('format')}: sparse weights are not supported")


def _groups(fields: Fields, common: str) -> list[_Group]:
    section = fields.section("config_groups")
    if section is None:
        return []
    found = []
    for name in section.values:
        group = section.section(name)
        if group is not None:
            found.append(_group(group, common))
    return found


def _group(fields: Fields, common: str) -> _Group:
    targets = fields.names("targets")
    if "Embedding" in targets:
        fields.refuse("targets has Embedding: quantized embeddings are not supported")
    if fields.has("output_activations"):
        fields.refuse("output_activations: rounding the outputs of layers is not supported")
    weights = fields.section("weights")
    if weights is None:
        return _Group(targets, None)
    # With several formats in one file each group says its own.
    form = fields.text("format", common).lower()
    if form != PACKED and form not in PLAIN:
        known = (PACKED, *PLAIN)
        reason = WHY_NOT.get(form) or ("each group must name its own" if form == SEVERAL else "")
        fields.refuse(f"format={form!r}: {reason or 'expected ' + ' or '.join(known)}")
    return _Group(targets, _scheme(weights, form, fields.section("input_activations")))


def _scheme(weights: Fields, form: str, inputs: Fields | None) -> Scheme:
    floating = weights.one_of("type", ("int", "float"), "int") == "float"
    bits = weights.bits("num_bits", (8,) if floating else (4, 8), 8)
    if weights.values.get("dynamic"):
        weights.wrong("dynamic", "false: weights have fixed scales")
    symmetric = weights.flag("symmetric", True)
    if floating and not symmetric:
        weights.wrong("symmetric", "true for floating-point weights")
    if floating and form == PACKED:
        weights.wrong("type", f"int for format={PACKED}")
    granularity, block = _sharing(weights)
    order = weights.values.get("actorder")
    if order not in (None, False, True, "group", "dynamic", "weight", "static"):
        weights.wrong("actorder", "group, weight or null")
    ordered = order in (True, "group", "dynamic")
    if ordered and form != PACKED:
        weights.wrong("actorder", f"weight or null for format={form}")
    return Scheme(
        METHOD,
        "packed" if form == PACKED else "plain",
        bits,
        granularity,
        floating=floating,
        block=block,
        symmetric=symmetric,
        ordered=ordered,
        activations=_activations(inputs, floating),
    )


def _sharing(weights: Fields) -> tuple[Any, tuple[int, int]]:
    """``granularity`` and ``block`` of a scheme. Without a ``strategy`` the group size says it."""
    group_size = weights.group_size("group_size", 0) if weights.has("group_size") else 0
    implied = {0: "tensor", -1: "channel"}.get(group_size, "group")
    strategies = ("tensor", "channel", "group", "block")
    strategy = weights.one_of("strategy", strategies, implied)
    if strategy == "group":
        if group_size < 1:
            weights.wrong("group_size", "a positive number for strategy=group")
        return strategy, (1, max(1, group_size))
    if strategy == "block":
        block = weights.block("block_structure")
        if block is None:
            weights.wrong("block_structure", "output and input features of a block, for example [128, 128]")
        return strategy, block or (1, 1)
    return strategy, (1, 0)


def _activations(inputs: Fields | None, floating_weights: bool) -> Activations:
    """What the checkpoint rounds activations to.

    Rows are rounded with scales of their own when they come, also where the checkpoint has a fixed scale for all: that
    is at least as close. What no kernel rounds to (4 bits, zero points, FP8 beside integer weights) is kept as it is,
    which is closer still.
    """
    if inputs is None:
        return "bf16"
    kind = inputs.one_of("type", ("int", "float"), "int")
    if inputs.integer("num_bits", 8) != 8 or not inputs.flag("symmetric", True):
        return "bf16"
    if kind == "float":
        return "fp8" if floating_weights else "bf16"
    return "bf16" if floating_weights else "int8"


def _first_match(name: str, groups: Sequence[_Group]) -> Scheme | None:
    """The scheme of the closest target: a name before a pattern, a pattern before a class, else in order."""
    matches = [
        (names.precedence(entry), index, group)
        for index, group in enumerate(groups)
        for entry in group.targets
        if names.targets(name, entry)
    ]
    return min(matches, key=lambda match: match[:2])[2].scheme if matches else None
