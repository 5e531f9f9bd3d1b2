"""What checkpoints say of themselves, by ``quant_method``: a new method is a file here and a line below.
Where its tensors lie otherwise, ``layouts`` has a file for that; formats made while loading are in ``on_load.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.checkpoint.files import shown
from engine.contracts.model import DeviceFacts, ModelFacts
from engine_plugins.quantizer.checkpoint.fields import Fields
from engine_plugins.quantizer.checkpoint.methods import awq, compressed_tensors, fp8, gptq, modelopt, mxfp4
from engine_plugins.quantizer.checkpoint.scheme import Recipe

METHODS: dict[str, Callable[[Fields], Recipe]] = {
    "compressed-tensors": compressed_tensors.parse,
    "fp8": fp8.parse,
    "modelopt": modelopt.parse,
    "awq": awq.parse,
    "gptq": gptq.parse,
    "mxfp4": mxfp4.parse,
}

SHOWN = 16
"""Problems of one checkpoint that are told."""


def recipe_of(quantization: Mapping[str, Any]) -> Recipe:
    """What ``quantization_config`` says, with everything in it that cannot be read in ``problems``."""
    problems: list[str] = []
    fields = Fields("quantization_config", quantization, problems)
    method = fields.text("quant_method").lower().replace("_", "-")
    parse = METHODS.get(method)
    if parse is None:
        fields.refuse(f"cannot be read; what can: {', '.join(METHODS)}")
        return Recipe(shown(quantization.get("quant_method")), lambda name, is_head: None, problems=tuple(problems))
    return parse(fields)


def unreadable(model: ModelFacts, device: DeviceFacts) -> tuple[str, ...]:
    """Reasons why the checkpoint's own format cannot be read, as far as its configuration shows."""
    if model.quantization is None:
        return ()
    recipe = recipe_of(model.quantization)
    reasons = tuple(f"quant_method={recipe.method}: {problem}" for problem in recipe.problems)
    more = (f"quant_method={recipe.method}: {len(reasons) - SHOWN} more problems",) if len(reasons) > SHOWN else ()
    return reasons[:SHOWN] + more
