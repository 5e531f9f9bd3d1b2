from engine.cli.plugins.templates.quantizer.plugin import MineQuantizer, MineQuantizerConfig
from engine.testing.context import build_context
from engine.testing.quantizer import QuantizerConformance


class TestMineQuantizer(QuantizerConformance):
    """What the core relies on."""

    weight_error = 0.0
    """Of the largest weight of a part. More where weights are rounded."""

    def make(self) -> MineQuantizer:
        return MineQuantizer(MineQuantizerConfig(), build_context())
