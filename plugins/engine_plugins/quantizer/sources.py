"""What is compiled for a plan. Imports no torch."""

from __future__ import annotations

from engine.contracts.provider import BuildContext
from engine.kernels.cpu.linear.sources import format_of, linear_sources
from engine.native import Source
from engine_plugins.quantizer.checkpoint.config import CheckpointConfig
from engine_plugins.quantizer.checkpoint.methods import recipe_of
from engine_plugins.quantizer.config import FP8Config, Int4Config, Int8Config, UnquantizedConfig


def of_plain(config: UnquantizedConfig, context: BuildContext) -> tuple[Source, ...]:
    return linear_sources(context)


def of_rounded(config: Int8Config | Int4Config | FP8Config, context: BuildContext) -> tuple[Source, ...]:
    assert config.weight_bits is not None
    form = format_of(config.weight_bits, isinstance(config, FP8Config))
    of_head = ("bytes",) if config.head == "int8" and form != "bytes" else ()
    return linear_sources(context, (form, *of_head), plain=config.head == "none")


def of_checkpoint(config: CheckpointConfig, context: BuildContext) -> tuple[Source, ...]:
    quantization = context.model.quantization
    if quantization is None:
        return linear_sources(context)
    schemes = recipe_of(quantization).schemes
    return linear_sources(context, tuple({format_of(scheme.bits, scheme.floating): None for scheme in schemes}))
