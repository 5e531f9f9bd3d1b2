"""AWQ in AutoAWQ's ``gemm`` layout (https://github.com/casper-hansen/AutoAWQ)."""

from __future__ import annotations

from engine_plugins.quantizer.checkpoint import names
from engine_plugins.quantizer.checkpoint.fields import Fields
from engine_plugins.quantizer.checkpoint.scheme import Recipe, Scheme, grouped

METHOD = "awq"


def parse(fields: Fields) -> Recipe:
    """The recipe of a ``quantization_config`` with ``quant_method=awq``."""
    bits = fields.bits(fields.either("bits", "w_bit"), (4,), 4)
    version = fields.text(fields.either("version", "format"), "gemm").lower()
    if version != "gemm":
        fields.refuse(f"version={version}: only the gemm layout can be read")
    if not fields.flag("zero_point", True):
        fields.wrong("zero_point", "true: the gemm layout has zero points")
    granularity, block = grouped(fields.group_size(fields.either("group_size", "q_group_size"), 128))
    left = fields.names("modules_to_not_convert")
    scheme = Scheme(METHOD, "awq", bits, granularity, block=block, symmetric=False, scale_names=("scales",))

    def scheme_of(name: str, is_head: bool) -> Scheme | None:
        # AutoAWQ quantizes the layers of decoder blocks only.
        return None if is_head or names.lists_part(name, left) else scheme

    return Recipe(METHOD, scheme_of, (scheme,), problems=tuple(fields.problems))
