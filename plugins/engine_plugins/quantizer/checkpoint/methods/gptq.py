"""GPTQ as AutoGPTQ and GPTQModel write it (https://github.com/ModelCloud/GPTQModel)."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from engine.checkpoint.limits import MAX_MODULES
from engine_plugins.quantizer.checkpoint import names
from engine_plugins.quantizer.checkpoint.fields import Fields
from engine_plugins.quantizer.checkpoint.scheme import Recipe, Scheme, grouped

METHOD = "gptq"
FIRST, SECOND = "gptq", "gptq_v2"
CONVERTED = "modules_in_block_to_quantize"


def parse(fields: Fields) -> Recipe:
    """The recipe of a ``quantization_config`` with ``quant_method=gptq``."""
    form = fields.text(fields.either("checkpoint_format", "format"), FIRST).lower()
    if form not in (FIRST, SECOND) or fields.flag("is_marlin_format", False):
        fields.refuse(f"checkpoint_format={form}: only {FIRST} and {SECOND} can be read, not what one kernel repacked")
    if fields.text("pack_dtype", "int32").lower() != "int32":
        fields.wrong("pack_dtype", "int32")
    empty = Scheme(METHOD, "gptq", 4, "group", scale_names=("scales",), stored_zeros_less_one=form == FIRST)
    scheme = _with(fields, empty, default_group=128)
    head = fields.flag("lm_head", False)
    converted = _converted(fields)
    rules = _dynamic(fields, scheme)
    left = fields.names("modules_to_not_convert")

    def scheme_of(name: str, is_head: bool) -> Scheme | None:
        if (is_head and not head) or names.lists_module(name, left):
            return None
        for pattern, found in rules:
            if re.match(pattern, name):
                return found
        return scheme if is_head or not converted or names.lists_module(name, converted) else None

    schemes = (scheme, *(found for _, found in rules if found is not None))
    return Recipe(METHOD, scheme_of, schemes, problems=tuple(fields.problems))


def _with(fields: Fields, scheme: Scheme, default_group: int) -> Scheme:
    """``scheme`` with what these fields say."""
    granularity, block = grouped(fields.group_size("group_size", default_group))
    return replace(
        scheme,
        bits=fields.bits("bits", (4, 8), scheme.bits),
        granularity=granularity,
        block=block,
        symmetric=fields.flag("sym", scheme.symmetric),
        ordered=fields.flag("desc_act", scheme.ordered),
    )


def _converted(fields: Fields) -> tuple[str, ...]:
    """``modules_in_block_to_quantize`` (optimum): lists of lists of layers; none: all layers of the blocks."""
    value = fields.values.get(CONVERTED)
    if value is None:
        return ()
    lists: list[Any] = value if isinstance(value, list) else [None]
    flat: list[Any] = [name for entry in lists for name in (entry if isinstance(entry, list) else [entry])]
    if len(flat) > MAX_MODULES or not all(isinstance(name, str) for name in flat):
        fields.wrong(CONVERTED, f"lists of names, at most {MAX_MODULES} (MAX_MODULES)")
        return ()
    return tuple(name for name in flat if fields.compiles(CONVERTED, name.removeprefix("re:"), name.startswith("re:")))


def _dynamic(fields: Fields, scheme: Scheme) -> list[tuple[str, Scheme | None]]:
    """``dynamic`` (GPTQModel): patterns of layer names, the first that matches counts. ``-:`` leaves a layer as it is;
    others bring values of their own."""
    section = fields.section("dynamic")
    rules: list[tuple[str, Scheme | None]] = []
    for key in section.values if section is not None else ():
        assert section is not None
        pattern = key.removeprefix("-:").removeprefix("+:")
        if not section.compiles("dynamic", pattern):
            continue
        if key.startswith("-:"):
            rules.append((pattern, None))
            continue
        own = section.section(key)
        default = scheme.block[1] if scheme.granularity == "group" else -1
        rules.append((pattern, scheme if own is None else _with(own, scheme, default)))
    return rules
