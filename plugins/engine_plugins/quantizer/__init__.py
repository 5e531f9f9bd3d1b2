"""How a weight is stored and multiplied."""

from __future__ import annotations

from engine.contracts.provider import Provider
from engine.hookspecs import hookimpl
from engine_plugins.quantizer.checkpoint.config import CheckpointConfig
from engine_plugins.quantizer.checkpoint.methods import unreadable
from engine_plugins.quantizer.config import FP8Config, Int4Config, Int8Config, UnquantizedConfig, only_plain_checkpoints


@hookimpl
def engine_quantizer() -> list[Provider]:
    return [
        Provider(
            "checkpoint",
            "engine_plugins.quantizer.checkpoint.quantizer:FromCheckpoint",
            config=CheckpointConfig,
            unsupported=unreadable,
            sources="engine_plugins.quantizer.sources:of_checkpoint",
            doc="As the checkpoint says (compressed-tensors, FP8, MXFP4, ModelOpt, AWQ, GPTQ); unquantized if silent.",
        ),
        Provider(
            "none",
            "engine_plugins.quantizer.unquantized:Unquantized",
            config=UnquantizedConfig,
            provides=("lossless",),
            unsupported=only_plain_checkpoints,
            sources="engine_plugins.quantizer.sources:of_plain",
            doc="Weights in the compute dtype.",
        ),
        Provider(
            "int8",
            "engine_plugins.quantizer.on_load:Int8",
            config=Int8Config,
            unsupported=only_plain_checkpoints,
            sources="engine_plugins.quantizer.sources:of_rounded",
            doc="Weights in 8 bits with one scale per output channel, rounded while loading.",
        ),
        Provider(
            "int4",
            "engine_plugins.quantizer.on_load:Int4",
            config=Int4Config,
            unsupported=only_plain_checkpoints,
            sources="engine_plugins.quantizer.sources:of_rounded",
            doc="Weights in 4 bits with a scale per group of inputs, rounded while loading.",
        ),
        Provider(
            "fp8",
            "engine_plugins.quantizer.on_load:FP8",
            config=FP8Config,
            unsupported=only_plain_checkpoints,
            sources="engine_plugins.quantizer.sources:of_rounded",
            doc="Weights in float8 (e4m3) with one scale per output channel, rounded while loading.",
        ),
    ]
