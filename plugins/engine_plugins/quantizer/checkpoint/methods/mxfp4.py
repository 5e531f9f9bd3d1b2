"""``quant_method=mxfp4``: experts as gpt-oss is published (arXiv 2508.10925), all of a layer in one tensor; everything
else is unquantized."""

from __future__ import annotations

from engine_plugins.quantizer.checkpoint import names
from engine_plugins.quantizer.checkpoint.fields import Fields
from engine_plugins.quantizer.checkpoint.scheme import Recipe, Scheme

METHOD = "mxfp4"
GROUP = 32


def parse(fields: Fields) -> Recipe:
    """The recipe of a ``quantization_config`` with ``quant_method=mxfp4``."""
    left = fields.names("modules_to_not_convert")
    scheme = Scheme(METHOD, "mxfp4", 4, "group", floating=True, block=(1, GROUP))

    def scheme_of(name: str, is_head: bool) -> Scheme | None:
        experts = name.rpartition(".")[0]
        is_left = names.lists_module(experts, left) or names.lists_wildcard(experts, left)
        return scheme if experts.endswith("experts") and not is_left else None

    return Recipe(METHOD, scheme_of, (scheme,), has_kv_scales=False, problems=tuple(fields.problems))
