from engine.cli.plugins.templates.kv_format.plugin import MineKVFormat, MineKVFormatConfig
from engine.testing.context import build_context
from engine.testing.kv_format import KVFormatConformance


class TestMineKVFormat(KVFormatConformance):
    """What the core relies on. A format with functions for Triton kernels inherits ``KVTileConformance`` instead."""

    def make(self) -> MineKVFormat:
        return MineKVFormat(MineKVFormatConfig(), build_context())


class TestMineKVFormatInBfloat16(KVFormatConformance):
    error = 2.0**-8
    """Of the largest element of a token's head: half a step."""

    def make(self) -> MineKVFormat:
        return MineKVFormat(MineKVFormatConfig(storage="bfloat16"), build_context())
