"""NVIDIA ModelOpt, FP8 (https://github.com/NVIDIA/Model-Optimizer): ``hf_quant_config.json``, or the same in
``quantization_config``."""

from __future__ import annotations

from engine_plugins.quantizer.checkpoint import names
from engine_plugins.quantizer.checkpoint.fields import Fields
from engine_plugins.quantizer.checkpoint.scheme import Recipe, Scheme

METHOD = "modelopt"
SCHEMES = {
    "FP8": Scheme(METHOD, "plain", 8, "tensor", floating=True, activations="fp8"),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme(METHOD, "plain", 8, "channel", floating=True, activations="fp8"),
    "FP8_PB_WO": Scheme(METHOD, "plain", 8, "block", floating=True, block=(128, 128), spaced=True),
}
KV = ("FP8", "INT8", "NVFP4", "FP8_CAST")


def parse(fields: Fields) -> Recipe:
    """The recipe of a ``quantization_config`` with ``quant_method=modelopt``."""
    inner = fields.section("quantization") or fields
    algorithm = inner.text("quant_algo").upper()
    scheme = SCHEMES.get(algorithm)
    if scheme is None and (algorithm or not inner.has("kv_cache_quant_algo")):
        inner.wrong("quant_algo", " or ".join(SCHEMES) + ": other algorithms of ModelOpt are not supported")
    kv = inner.text("kv_cache_quant_algo").upper()
    if kv and kv not in KV:
        inner.wrong("kv_cache_quant_algo", " or ".join(KV))
    left = (*inner.names("exclude_modules"), *inner.names("ignore"))

    def scheme_of(name: str, is_head: bool) -> Scheme | None:
        return None if names.lists_wildcard(name, left) else scheme

    schemes = () if scheme is None else (scheme,)
    return Recipe(METHOD, scheme_of, schemes, _is_fp8(inner, kv), tuple(fields.problems))


def _is_fp8(fields: Fields, kv: str) -> bool:
    """Whether scales of cached keys and values, if there are any, are for FP8."""
    scheme = fields.section("kv_cache_scheme")
    if scheme is None:
        return kv in ("", "FP8", "FP8_CAST")
    return (scheme.text("type", "float"), scheme.integer("num_bits", 8)) == ("float", 8)
