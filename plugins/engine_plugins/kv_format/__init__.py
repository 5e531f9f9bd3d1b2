"""How a cached key or value is stored."""

from __future__ import annotations

from engine.contracts.provider import Provider
from engine.hookspecs import hookimpl


@hookimpl
def engine_kv_format() -> list[Provider]:
    return [
        Provider(
            "native",
            "engine_plugins.kv_format.native:NativeFormat",
            provides=("lossless",),
            doc="Keys and values in the compute dtype.",
        ),
        Provider(
            "fp8",
            "engine_plugins.kv_format.fp8:FP8Format",
            doc="Keys and values in float8 (e4m3), scaled as the checkpoint says.",
        ),
        Provider(
            "int8",
            "engine_plugins.kv_format.int8:Int8Format",
            doc="Keys and values in 8 bits, one scale per token and head.",
        ),
    ]
