"""``quant_method=fp8``: e4m3 weights as DeepSeek-V3 and Qwen3 are published in (one scale for a block), as
transformers' FP8 quantizer writes them, or as AutoFP8 did (one scale for a tensor)."""

from __future__ import annotations

from engine_plugins.quantizer.checkpoint import names
from engine_plugins.quantizer.checkpoint.fields import Fields
from engine_plugins.quantizer.checkpoint.scheme import Recipe, Scheme

METHOD = "fp8"
SCALES = ("weight_scale_inv", "weight_scale")
"""Both are what a stored number is multiplied by, whatever the name says."""


def parse(fields: Fields) -> Recipe:
    """The recipe of a ``quantization_config`` with ``quant_method=fp8``."""
    fields.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    fields.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    block = fields.block("weight_block_size")
    left = (*fields.names("modules_to_not_convert"), *fields.names("ignored_layers"))
    scheme = Scheme(
        METHOD,
        "plain",
        8,
        "tensor" if block is None else "block",
        floating=True,
        block=block or (1, 0),
        scale_names=SCALES,
        activations="fp8",
    )

    def scheme_of(name: str, is_head: bool) -> Scheme | None:
        # No writer of this format converts the head, and not all of them list it.
        return None if is_head or names.lists_module(name, left) else scheme

    return Recipe(METHOD, scheme_of, (scheme,), problems=tuple(fields.problems))
